"""A worker that hosts streams and does nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from epd.jobs import Stage
from epd.runtime.group import Description, Load, Wait
from epd.runtime.steps import EngineThread, StepLoop
from epd.runtime.streams import Streams


class IdleWorker:
    """`epd.runtime.group.Worker` with switches."""

    def __init__(self, stage: Stage, thread: EngineThread | None = None, **facts: Any) -> None:
        self.stage = stage
        self.facts: dict[str, Any] = {
            "epoch": 1,
            "fingerprint": "f",
            "dtype": "float32",
            "numerics_id": "",
        }
        self.facts |= facts
        self.streams = Streams(stage)
        self.tickets = self.handed_back = self.ticks = 0
        self.intact = self.well = self.reaches = True
        self.busy = self.broken = self.closed = False
        self.steps = StepLoop(stage, self._step, lambda: self.busy, thread)

    async def _step(self) -> bool:
        assert not self.broken, "bookkeeping"
        return False

    def describe(self) -> Description:
        return Description(**self.facts)

    def load(self) -> Load:
        return Load(1, 2, self.facts.get("kv_tokens", 0))

    def state(self) -> Mapping[str, object]:
        return {"tickets": self.tickets, "tasks": 3, "streams": len(self.streams)}

    def check_integrity(self) -> None:
        if not self.intact:
            raise AssertionError("leak")

    def healthy(self) -> bool:
        return self.well

    def reaches_peers(self) -> bool:
        return self.reaches

    def waits(self) -> list[Wait]:
        return [("request-7", 1.5, "godot")]

    def tick(self) -> None:
        self.ticks += 1

    def hand_back(self) -> None:
        self.handed_back += 1

    def start(self) -> asyncio.Task[None]:
        return self.steps.start()

    async def shut_down(self) -> None:
        await self.steps.close()
        self.closed = True
