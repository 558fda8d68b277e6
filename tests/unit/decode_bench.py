"""A decode worker with a fake model and a fake transfer engine, and words to use it with."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from decode.ticket import Ticket
from decode.worker import DecodeWorker
from epd.handoff import kv_contract
from epd.jobs import SampledToken, Stage
from epd.kv.pool import KvPool
from epd.runtime.kv import make_store
from epd.transfer.checksum import checksum
from epd.transfer.contract import Handle, Span
from tests.unit.fake_stage import BLOCK, FakeLm, FakeMemory, config, decode_job
from tests.waiting import LIMIT_S, until


class Bench:
    """A decode worker, and the pool of an owner that it reads from."""

    def __init__(self, **settings: Any) -> None:
        self.lm, self.memory = FakeLm(), FakeMemory()
        lm: Any = self.lm
        memory: Any = self.memory
        made = config(**settings)
        self.kv = make_store(made, [Stage.DECODE], lm, memory)
        self.worker = DecodeWorker(made, lm, memory, self.kv, 60)
        self.worker.start()
        self.owner = KvPool(self.lm.kv_layout, 64)
        self._at = 0

    @property
    def used(self) -> Any:
        return self.worker.state()["kv_blocks_used"]

    async def close(self) -> None:
        """After the running step and the last read nothing is held."""
        self.lm.gate.set()
        self.memory.engine.gate.set()
        await self.memory.engine.settled()
        await until(lambda: not self.worker.steps.in_step and self.used == 0)
        await self.worker.shut_down()
        self.worker.check_integrity()
        assert self.used == 0
        assert self.worker.state()["tickets"] == 0

    def handle(self, blocks: Sequence[int], nonce: int = 5) -> Handle:
        size = self.owner.layout.block_bytes
        spans = [
            Span(self.owner.address(b), size, checksum(self.owner.block_bytes_view(b)))
            for b in blocks
        ]
        contract = kv_contract(self.lm.spec, self.owner.layout, nonce)
        return Handle(FakeMemory.peer, contract, tuple(spans), 1000)

    def compute(self, ids: Sequence[int], at: int = 0) -> None:
        """What prefill would: KV of these tokens, from the owner's block `at` on."""
        for place, token in enumerate(ids):
            self.owner.k(0)[at + place // BLOCK, place % BLOCK] = token

    async def join(self, ids: Sequence[int], first: int = 50, **job: Any) -> Ticket:
        """Submit, announce everything, start."""
        at, self._at = self._at, (self._at + 16) % 64
        self.compute(ids, at)
        ticket = await self.worker.submit(decode_job(ids, **job))
        blocks = -(-len(ids) // BLOCK)
        self.worker.kv_ready(ticket, 0, self.handle(range(at, at + blocks)), len(ids))
        self.worker.begin(ticket, SampledToken(first), len(ids))
        return ticket


async def drain(ticket: Ticket, into: list[Any] | None = None) -> list[Any]:
    events = [] if into is None else into
    async with asyncio.timeout(LIMIT_S):
        while taken := await ticket.events.take():
            events += taken
    return events
