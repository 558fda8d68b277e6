"""Prefill and decode in one process: blocks change hands, bytes don't move, nothing leaks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.ticket import Finished, KvFetched, TokenMade
from decode.ticket import ReadsTerminal as DecodeTerminal
from decode.worker import DecodeWorker
from epd.errors import EpdError, ErrorKind
from epd.jobs import SampledToken, Stage
from epd.kv.pool import KvPool
from epd.models.lm import ForwardBatch
from epd.obs import metrics
from epd.runtime.kv import make_store
from epd.runtime.steps import EngineThread
from prefill.ticket import FirstToken, KvReady
from prefill.ticket import ReadsTerminal as PrefillTerminal
from prefill.worker import PrefillWorker
from tests.readings import reading
from tests.unit.fake_stage import BLOCK, FakeLm, FakeMemory, config, decode_job, prefill_job
from tests.waiting import LIMIT_S, a_moment, until


class CheckedLm(FakeLm):
    """Prompts count up, and so does the output: in any block table the ids must, too."""

    hold_at = 0
    """The first step of two sequences that both are so long waits for the gate."""

    def forward(self, batch: ForwardBatch, pool: KvPool) -> torch.Tensor:
        lengths = [sequence.kv_len for sequence in batch.sequences]
        if self.hold_at and len(lengths) == 2 and min(lengths) >= self.hold_at:
            self.hold_at = 0
            self.gate.clear()
        logits = super().forward(batch, pool)
        for sequence in batch.sequences:
            places = range(sequence.kv_len)
            ids = [int(pool.k(0)[sequence.blocks[p // BLOCK], p % BLOCK, 0, 0]) for p in places]
            first = ids[0]
            assert ids == [(first + i) % 100 for i in places], "KV of somebody else"
        return logits


class Together:
    def __init__(self, **flags: Any) -> None:
        self.lm, self.memory = CheckedLm(), FakeMemory()
        lm: Any = self.lm
        memory: Any = self.memory
        made, thread = config(**flags), EngineThread("both")
        self.kv = make_store(made, [Stage.PREFILL, Stage.DECODE], lm, memory)
        self.prefill = PrefillWorker(made, lm, memory, self.kv, 1000, thread)
        self.decode = DecodeWorker(made, lm, memory, self.kv, 60, thread)
        self.prefill.start()
        self.decode.start()

    @property
    def used(self) -> int:
        return self.kv.blocks.used

    async def close(self) -> None:
        both = (self.prefill, self.decode)
        busy = lambda worker: worker.steps.in_step or worker.state()["tickets"]  # noqa: E731
        await until(lambda: not any(map(busy, both)) and not self.memory.engine.readers)
        self.memory.now += 10
        for worker in both:
            worker.tick()
            worker.check_integrity()
            assert worker.state()["tickets"] == 0
        assert self.used == 0
        assert len(self.kv.grants) == 0
        await self.prefill.shut_down()
        await self.decode.shut_down()


@dataclass
class Run:
    """One request, driven as a gateway does."""

    both: Together
    ids: Sequence[int]
    max_tokens: int = 6
    choices: int = 1
    leave_after: int | None = None
    """Events of prefill after which the client goes away."""
    lost: bool = False
    """It goes without a word."""
    nonce: int = 5
    outputs: list[list[int]] = field(default_factory=list)
    moved: int = 0
    released: bool = False

    async def go(self) -> None:
        job = prefill_job(self.ids, self.max_tokens)
        self.outputs = [[] for _ in range(self.choices)]
        self.ticket = await self.both.prefill.submit(
            replace(job, choices=self.choices, nonce=self.nonce)
        )
        self.decodes = [
            await self.both.decode.submit(
                replace(decode_job(self.ids, self.max_tokens), nonce=self.nonce)
            )
            for _ in range(self.choices)
        ]
        try:
            await self._follow()
        finally:
            for decode in self.decodes:
                self.both.decode.close(decode)
            if not self.released:
                self.both.prefill.close(self.ticket, clean=not self.lost)

    async def _follow(self) -> None:
        left = self.leave_after
        first: FirstToken | None = None
        while first is None:
            taken = await self.ticket.events.take()
            assert taken
            for event in taken:
                if left is not None and left <= 0:
                    return await self._leave()
                left = None if left is None else left - 1
                if isinstance(event, KvReady):
                    for decode in self.decodes:
                        args = (event.first_block, event.handle, event.tokens)
                        self.both.decode.kv_ready(decode, *args)
                elif isinstance(event, FirstToken):
                    first = event
        tokens = [first.token, *(other.token for other in first.others)]
        fetched = [asyncio.Event() for _ in tokens]
        release = asyncio.create_task(self._release(fetched))
        try:
            async with asyncio.TaskGroup() as group:
                for number, token in enumerate(tokens):
                    group.create_task(self._decode(number, token, fetched[number]))
        except* EpdError as failed:
            raise failed.exceptions[0] from None
        finally:
            release.cancel()

    async def _release(self, fetched: list[asyncio.Event]) -> None:
        for event in fetched:
            await event.wait()
        self.both.prefill.half_close(self.ticket)
        self.both.prefill.close(self.ticket, clean=True)
        self.released = True

    async def _decode(self, number: int, first: SampledToken, fetched: asyncio.Event) -> None:
        output, decode = self.outputs[number], self.decodes[number]
        output.append(first.id)
        if self.max_tokens == 1:
            fetched.set()
            return
        self.both.decode.begin(decode, first, len(self.ids))
        while taken := await decode.events.take():
            for event in taken:
                if isinstance(event, KvFetched):
                    self.moved += event.transfer_bytes
                    fetched.set()
                elif isinstance(event, TokenMade):
                    output.append(event.token.id)
                elif isinstance(event, Finished):
                    assert event.output_tokens == len(output)

    async def _leave(self) -> None:
        if self.lost:
            return
        for decode in self.decodes:
            self.both.decode.cancel(decode)
            await until_event(decode.events, DecodeTerminal)
        self.both.prefill.cancel(self.ticket)
        await until_event(self.ticket.events, PrefillTerminal)


async def until_event(mailbox: Any, kind: type) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not any(isinstance(event, kind) for event in await mailbox.take()):
            pass


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11])
async def test_full_blocks_are_shared_and_the_last_is_copied(length: int) -> None:
    both = Together(prefill__chunk_tokens=3, prefill__prefix_cache=False)
    adopted = reading(metrics.ADOPTED_BLOCKS)
    run = Run(both, range(20, 20 + length))
    await asyncio.wait_for(run.go(), LIMIT_S)
    assert run.outputs == [[20 + length + i for i in range(6)]]
    assert run.moved == 0
    assert reading(metrics.ADOPTED_BLOCKS) == adopted + length // BLOCK
    await both.close()


async def test_choices_share_the_prompt_and_write_each_for_itself() -> None:
    both = Together()
    run = Run(both, range(20, 31), choices=3)
    await asyncio.wait_for(run.go(), LIMIT_S)
    assert run.outputs == [[31 + i for i in range(6)]] * 3
    await both.close()


async def test_the_next_turn_finds_what_decode_computed() -> None:
    both = Together()
    await asyncio.wait_for(Run(both, range(20, 30), max_tokens=9).go(), LIMIT_S)
    ticket = await both.prefill.submit(replace(prefill_job(range(20, 40)), nonce=9))
    await until(lambda: len(ticket.sums) >= 5)
    assert ticket.cached_tokens == 16, "the answer's blocks, too"
    both.prefill.close(ticket, clean=True)
    await both.close()


async def test_the_event_loop_never_waits_for_a_device_s_copy_of_what_decode_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sums come from the step's thread, once."""
    both = Together(transfer__staging="always")
    seen: list[tuple[str, int]] = []
    original = KvPool.to_peers

    def note(pool: KvPool, blocks: Sequence[int]) -> None:
        seen.append((threading.current_thread().name, len(blocks)))
        original(pool, blocks)

    monkeypatch.setattr(KvPool, "to_peers", note)
    known = []
    for nonce, length in enumerate((10, 20, 22)):
        run = Run(both, range(20, 20 + length), max_tokens=9, nonce=nonce)
        job = replace(prefill_job(run.ids), nonce=90 + nonce)
        ticket = await both.prefill.submit(job)
        known.append((ticket.cached_tokens, len(ticket.sums)))
        both.prefill.close(ticket, clean=True)
        await asyncio.wait_for(run.go(), LIMIT_S)
        assert run.outputs == [[20 + length + i for i in range(9)]]
    assert known == [(0, 0), (16, 2), (20, 5)], "4 of 16 tokens are prefill's, then all"
    assert {name for name, _ in seen} == {"both-engine_0"}
    await both.close()


async def test_a_lease_that_is_over_gives_nothing() -> None:
    """What a handle names may be another request's by now."""
    both = Together(prefill__prefix_cache=False)
    ticket = await both.prefill.submit(prefill_job(range(20, 30)))
    ready = None
    while ready is None:
        ready = next((e for e in await ticket.events.take() if isinstance(e, KvReady)), None)
    both.prefill.close(ticket, clean=True)
    decode = await both.decode.submit(decode_job(range(20, 30)))
    both.decode.kv_ready(decode, 0, ready.handle, ready.tokens)
    with pytest.raises(EpdError) as caught:
        await until_event(decode.events, KvFetched)
    assert caught.value.kind is ErrorKind.TRANSFER_FAILED
    both.decode.close(decode)
    await both.close()


async def test_prefill_leaves_decode_its_part_of_the_pool() -> None:
    """Prompts that fill prefill's part wait, though the pool has room."""
    both = Together(kv__prefill_tokens=64, kv__decode_tokens=64)
    tickets = [
        await both.prefill.submit(replace(prefill_job(range(n, n + 40)), nonce=n))
        for n in (20, 30, 40)
    ]
    await a_moment()
    assert [ticket.admitted for ticket in tickets] == [True, False, False]
    assert both.kv.blocks.free_count == 32 - 10
    for number, ticket in enumerate(tickets):
        await until(partial(getattr, ticket, "admitted"))
        assert not any(ticket.admitted for ticket in tickets[number + 1 :])
        both.prefill.close(ticket, clean=True)
    await both.close()


async def test_prefill_hears_of_blocks_that_decodes_step_gave_back() -> None:
    """Both answers end while their step runs: after it nothing else of decode happens."""
    both = Together(prefill__prefix_cache=False)
    both.lm.hold_at = 44 + 3
    runs = [Run(both, range(20 + n, 64 + n), max_tokens=15, nonce=n) for n in range(2)]
    running = [asyncio.create_task(run.go()) for run in runs]
    await until(lambda: not both.lm.gate.is_set() and all(run.released for run in runs))
    assert both.decode.steps.in_step
    ticket = await both.prefill.submit(replace(prefill_job(range(20, 60)), nonce=9))
    assert not ticket.admitted
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await a_moment()  # prefill has looked, in vain
    assert not ticket.admitted
    both.lm.gate.set()
    await until(lambda: ticket.admitted, limit_s=10)
    both.prefill.close(ticket, clean=True)
    await both.close()


REQUESTS = st.lists(
    st.tuples(
        st.integers(20, 23),  # first id: prompts that start alike share blocks
        st.integers(1, 40),
        st.integers(1, 14),
        st.integers(1, 3),
        st.one_of(st.none(), st.integers(0, 4)),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(REQUESTS, st.sampled_from([3, 16, 512]), st.booleans())
def test_any_mix_of_requests(
    requests: list[tuple[int, int, int, int, int | None, bool]], chunk: int, cached: bool
) -> None:
    asyncio.run(asyncio.wait_for(run_all(requests, chunk, cached), 60))


async def run_all(
    requests: list[tuple[int, int, int, int, int | None, bool]], chunk: int, cached: bool
) -> None:
    both = Together(
        prefill__chunk_tokens=chunk,
        prefill__prefix_cache=cached,
        kv__prefill_tokens=64,
        kv__decode_tokens=64,
    )
    runs = [
        Run(both, range(first, first + length), most, choices, leave, lost, nonce=number)
        for number, (first, length, most, choices, leave, lost) in enumerate(requests)
    ]
    ticking = asyncio.create_task(tick(both))
    results = await asyncio.gather(*(run.go() for run in runs), return_exceptions=True)
    ticking.cancel()
    for run, result in zip(runs, results, strict=True):
        if isinstance(result, BaseException):
            assert isinstance(result, EpdError), result
            assert result.kind is ErrorKind.OVERLOADED, result  # pushed out by older ones
        for output in run.outputs:
            assert output == [(run.ids[-1] + 1 + i) % 100 for i in range(len(output))]
            if result is None and run.leave_after is None:
                assert len(output) == run.max_tokens
    assert all(run.moved == 0 for run in runs)
    await both.close()


async def tick(both: Together) -> None:
    """Quarantines end while requests wait."""
    while True:
        await asyncio.sleep(0.01)
        both.memory.now += 0.5
        both.prefill.tick()
        both.decode.tick()
