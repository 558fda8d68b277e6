"""Cases KEY-01, KEY-11, KEY-13, HND-24, LIF-05: real workers, a model that reads its cache.

Random prompts that begin alike, with pictures of equal size, in pools that hold two or three
of them; reads that lag, clients that leave, readers that are lost. Whatever is found, evicted
or overwritten: who gets an answer gets the right one.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Hashable, Sequence
from typing import Any

import pytest
from torch import Tensor

from decode.ticket import TokenMade
from epd.errors import EpdError, ErrorKind
from epd.handoff import embedding_contract
from epd.jobs import SampledToken
from epd.kv.pool import KvPool
from epd.models.batch import ForwardBatch
from epd.pages import touched
from epd.transfer.checksum import checksum
from epd.transfer.contract import Handle, Span
from epd.transfer.pieces import Piece
from prefill.ticket import Admitted, FirstToken
from tests.cases.kv_model import ROW_BYTES, KvLm, Prompt, row_value, rows_of
from tests.unit import decode_bench, fake_stage, prefill_bench
from tests.unit.fake_stage import BLOCK, FakeEngine, FakeMemory, decode_job, prefill_job
from tests.waiting import LIMIT_S


def embedding(picture: str) -> Any:
    """Rows as an encoder would hold them."""
    rows = rows_of(picture)
    memory = touched(rows * ROW_BYTES)
    view = memory.numpy().view("float32").reshape(rows, -1)
    view[:, 0] = [row_value(picture, row) for row in range(rows)]
    return memory


def announced(bench: prefill_bench.Bench, memory: Any) -> Handle:
    """As an encoder would announce them."""
    rows = len(memory) // ROW_BYTES
    span = Span(memory.data_ptr(), len(memory), checksum(memory))
    return Handle(FakeMemory.peer, embedding_contract(bench.lm.spec, rows, 5), (span,), 1000)


class Lagging(FakeEngine):
    """Each read takes its own time, so that one that was given up may write last."""

    chance = random.Random(0)

    async def _copy(self, pieces: Sequence[Piece], key: Hashable) -> None:
        await asyncio.sleep(self.chance.choice([0, 0.001, 0.004, 0.06]))
        await super()._copy(pieces, key)


class Prefills:
    """Many requests at one prefill worker."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        monkeypatch.setattr(prefill_bench, "FakeLm", KvLm)
        monkeypatch.setattr(fake_stage, "FakeEngine", Lagging)
        self.bench = prefill_bench.Bench(prefill__chunk_tokens=6, **settings)
        self.chance = random.Random(seed)
        self.memories = {name: embedding(name) for name in "ABCDE"}
        self.right = self.cached = self.kept = 0

    async def one(self, prompt: Prompt) -> None:
        """From submit to close; left early now and then, and not always in good order."""
        job = prefill_job(prompt.ids, items=prompt.items)
        ticket = await self.bench.worker.submit(job)
        leaves = self.chance.random() < 0.25
        try:
            async with asyncio.timeout(self.chance.uniform(0, 0.02) if leaves else LIMIT_S):
                await self._follow(ticket, prompt)
        except TimeoutError:
            assert leaves, "a request hangs"
        self.bench.worker.close(ticket, clean=self.chance.random() < 0.8)

    async def _follow(self, ticket: Any, prompt: Prompt) -> None:
        while True:
            for event in await ticket.events.take():
                if isinstance(event, Admitted):
                    self.cached += event.cached_tokens
                    self.kept += not event.cached_tokens and (
                        len(event.missing_items) < len(set(prompt.pictures))
                    )
                    await self._encode(ticket, prompt, event)
                if isinstance(event, FirstToken):
                    assert event.token.id == prompt.after(1)[0], prompt
                    self.right += 1
                    return

    async def _encode(self, ticket: Any, prompt: Prompt, admitted: Admitted) -> None:
        missing = list(admitted.missing_items)
        self.chance.shuffle(missing)
        for index in missing:
            await asyncio.sleep(self.chance.choice([0, 0, 0.001]))
            handle = announced(self.bench, self.memories[prompt.pictures[index]])
            self.bench.worker.embedding_ready(ticket, index, handle)

    async def clock(self) -> None:
        """Reads lag, and quarantines end."""
        while True:
            gate = self.bench.memory.engine.gate
            gate.set() if self.chance.random() < 0.7 else gate.clear()
            self.bench.memory.now += 0.2
            self.bench.worker.tick()
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("seed", range(4))
async def test_key_01_key_13_prefill_finds_only_what_is_the_same(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = Prefills(seed, monkeypatch)
    clock = asyncio.create_task(many.clock())
    for _ in range(20):
        prompts = [Prompt.draw(many.chance) for _ in range(4)]
        await asyncio.gather(*(many.one(prompt) for prompt in prompts))
        many.bench.kv.check_integrity()
    clock.cancel()
    assert many.right > 40
    assert many.cached > 50, "nothing was ever found"
    assert many.kept > 5, "no embedding was ever found"
    await many.bench.close()


class Slow(KvLm):
    """A step goes on when its requests have left, and others have come."""

    chance = random.Random(0)

    def forward(self, batch: ForwardBatch, pool: KvPool) -> Tensor:
        time.sleep(self.chance.choice([0, 0, 0.004, 0.02]))
        return super().forward(batch, pool)


async def decode_one(bench: decode_bench.Bench, prompt: Prompt, chance: random.Random) -> int:
    """Hand a prompt over and follow it to its end, or leave; how many ids were right."""
    at, total = chance.randrange(0, 5) * 10, len(prompt.ids)
    count = chance.randrange(2, 12)
    job = decode_job(prompt.ids, max_tokens=count, items=prompt.items)
    ticket = await bench.worker.submit(job)
    for place, value in enumerate(prompt.values):
        bench.owner.k(0)[at + place // BLOCK, place % BLOCK] = value
    expected = prompt.after(count)
    handle = bench.handle(range(at, at - (-total // BLOCK)))
    bench.worker.kv_ready(ticket, 0, handle, total)
    bench.worker.begin(ticket, SampledToken(expected[0]), total)
    leaves = chance.random() < 0.3
    said: list[int] = []
    try:
        async with asyncio.timeout(chance.uniform(0, 0.02) if leaves else LIMIT_S):
            while events := await ticket.events.take():
                said += [event.token.id for event in events if isinstance(event, TokenMade)]
        assert len(said) == count - 1
    except TimeoutError:
        assert leaves, "a request hangs"
    except EpdError as error:
        # The owner's blocks are written over here while they are read: that is found out.
        if error.kind not in (ErrorKind.OVERLOADED, ErrorKind.CHECKSUM_MISMATCH):
            raise
    bench.worker.close(ticket)
    assert said == expected[1 : 1 + len(said)], prompt
    return len(said)


@pytest.mark.parametrize("seed", range(4))
async def test_hnd_24_key_01_decode_runs_on_its_own_blocks(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_bench, "FakeLm", Slow)
    monkeypatch.setattr(fake_stage, "FakeEngine", Lagging)
    bench, chance = decode_bench.Bench(), random.Random(seed)
    places = asyncio.Semaphore(4)

    async def next_one() -> int:
        async with places:
            bench.kv.check_integrity()
            return await decode_one(bench, Prompt.draw(chance, 32), chance)

    right = sum(await asyncio.gather(*(next_one() for _ in range(80))))
    assert right > 100
    await bench.close()
