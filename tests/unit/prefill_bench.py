"""A prefill worker with a fake model and a fake transfer engine, and words to use it with."""

from __future__ import annotations

import asyncio
from typing import Any

from epd.handoff import embedding_contract
from epd.jobs import ImageItem, Stage
from epd.runtime.kv import make_store
from epd.transfer.checksum import checksum
from epd.transfer.contract import Handle, Span
from prefill.ticket import Ticket
from prefill.worker import PrefillWorker
from tests.unit.fake_stage import FakeLm, FakeMemory, config
from tests.waiting import LIMIT_S, until


class Bench:
    def __init__(self, model: FakeLm | None = None, **settings: Any) -> None:
        self.lm, self.memory = model or FakeLm(), FakeMemory()
        lm: Any = self.lm
        memory: Any = self.memory
        made = config(**settings)
        self.kv = make_store(made, [Stage.PREFILL], lm, memory)
        self.worker = PrefillWorker(made, lm, memory, self.kv, 1000)
        self.worker.start()

    @property
    def used(self) -> Any:
        return self.worker.state()["kv_blocks_used"]

    async def close(self) -> None:
        """After the running step nothing is held."""
        self.lm.gate.set()
        self.memory.engine.gate.set()
        await until(lambda: not self.worker.steps.in_step and not self.worker.state()["tickets"])
        await self.memory.engine.settled()
        await self.worker.shut_down()
        self.idle()

    def idle(self) -> None:
        self.memory.now += 10
        self.worker.tick()
        self.worker.check_integrity()
        assert self.used == 0
        assert self.worker.state()["arena_bytes_used"] == 0
        assert self.worker.state()["tickets"] == 0


async def until_event(ticket: Ticket, kind: type) -> list[Any]:
    """Events up to the first of `kind`."""
    events: list[Any] = []
    async with asyncio.timeout(LIMIT_S):
        while not any(isinstance(event, kind) for event in events):
            taken = await ticket.events.take()
            assert taken, f"closed without {kind.__name__}: {events}"
            events += taken
    return events


async def in_step(ticket: Ticket) -> None:
    await until(lambda: ticket.in_step)


def image(rows: int = 3, name: str = "d", index: int = 0, images: int = 1) -> ImageItem:
    return ImageItem(index, name.encode() * 32, rows, (), 8, 8, images)


def announced(bench: Bench, memory: Any, nonce: int = 5, rows: int = 3) -> Handle:
    span = Span(memory.data_ptr(), rows * 16, checksum(memory[: rows * 16]))
    contract = embedding_contract(bench.lm.spec, rows, nonce)
    return Handle(FakeMemory.peer, contract, (span,), 1000)
