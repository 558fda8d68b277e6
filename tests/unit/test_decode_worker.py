"""The decode worker's own logic, with a fake model and a fake transfer engine."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from typing import Any

import pytest

from decode.ticket import Admitted, Finished, KvFetched, ReadsTerminal, Ticket, TokenMade
from epd.errors import EpdError, ErrorKind
from epd.jobs import FinishReason, SampledToken
from tests.uncollected import uncollected
from tests.unit.decode_bench import Bench, drain
from tests.unit.fake_stage import POISON, decode_job
from tests.waiting import a_moment, until


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    await made.close()


async def test_a_whole_output(bench: Bench) -> None:
    ticket = await bench.join(range(20, 30), max_tokens=5)
    events = await drain(ticket)
    assert [type(e) for e in events] == [Admitted, KvFetched, *[TokenMade] * 4, Finished]
    made = [e for e in events if isinstance(e, TokenMade)]
    assert [(e.index, e.token.id) for e in made] == [(1, 51), (2, 52), (3, 53), (4, 54)]
    assert [e.reason for e in made] == [None, None, None, FinishReason.LENGTH]
    assert (events[-1].reason, events[-1].output_tokens) == (FinishReason.LENGTH, 5)
    assert events[-1].timing.transfer_bytes == 3 * bench.owner.layout.block_bytes
    assert bench.used == 0, "free at the end, whatever the client does"
    bench.worker.close(ticket)


async def test_what_waits_is_handed_back_as_not_started(bench: Bench) -> None:
    """And what reads or runs is not."""
    running = await bench.join(range(20, 30), max_tokens=5)
    waiting = await bench.worker.submit(decode_job(range(20, 30), max_tokens=5))
    bench.worker.hand_back()
    with pytest.raises(EpdError) as caught:
        await drain(waiting)
    assert caught.value.kind is ErrorKind.NOT_STARTED
    bench.worker.close(waiting)
    assert isinstance((await drain(running))[-1], Finished)
    bench.worker.close(running)


async def test_a_burst_gives_way_to_another_client_in_a_full_queue() -> None:
    """A few requests with many choices each."""
    bench = Bench(decode__max_queue=3)
    job = functools.partial(decode_job, range(20, 30), max_tokens=5)
    burst = [await bench.worker.submit(job(salt=b"burst")) for _ in range(3)]
    with pytest.raises(EpdError, match=r"decode\.max_queue"):
        await bench.worker.submit(job(salt=b"burst"))
    other = await bench.worker.submit(job(salt=b"one"))
    with pytest.raises(EpdError) as caught:
        await drain(burst[2])
    assert caught.value.kind is ErrorKind.OVERLOADED
    assert not any(ticket.events.closed for ticket in (*burst[:2], other))
    for ticket in (*burst, other):
        bench.worker.close(ticket)
    await bench.close()


async def test_a_pushed_out_request_comes_again_into_a_full_queue() -> None:
    bench = Bench(decode__max_queue=1)
    waiting = await bench.worker.submit(decode_job(range(20, 30)))
    again = await bench.worker.submit(decode_job(range(20, 30), prompt=8))
    for ticket in (waiting, again):
        bench.worker.close(ticket)
    await bench.close()


async def test_nothing_is_kept_of_a_request_that_left_while_it_read(bench: Bench) -> None:
    bench.memory.engine.gate.clear()
    with uncollected(Ticket) as alive:
        ticket = await bench.join(range(20, 30))
        await until(lambda: bench.memory.engine.readers)
        bench.worker.close(ticket)
        del ticket
        bench.memory.engine.gate.set()
        await until(lambda: not alive(), limit_s=10)


async def test_the_end_of_the_context_ends_the_output(bench: Bench) -> None:
    ticket = await bench.join([20] * 57, max_tokens=100)
    finished = (await drain(ticket))[-1]
    assert (finished.reason, finished.output_tokens) == (FinishReason.LENGTH, 3)
    bench.worker.close(ticket)


async def test_blocks_are_read_while_prefill_goes_on(bench: Bench) -> None:
    ticket = await bench.worker.submit(decode_job(range(20, 30), max_tokens=2))
    assert [what for _, _, what in bench.worker.waits()] == ["its first blocks to be announced"]
    bench.worker.kv_ready(ticket, 0, bench.handle([0]), 4)
    await until(lambda: ticket.loaded_blocks == 1)
    assert [what for _, _, what in bench.worker.waits()] == ["reads: 1 of 1 announced blocks here"]
    assert not ticket.fetched
    bench.worker.kv_ready(ticket, 1, bench.handle([1, 2]), 10)
    bench.worker.begin(ticket, SampledToken(50), 10)
    assert isinstance((await drain(ticket))[-1], Finished)
    bench.worker.close(ticket)


@pytest.mark.parametrize(
    ("first_block", "blocks", "tokens", "kind"),
    [
        (1, [0], 4, ErrorKind.INVALID_REQUEST),
        (0, [0], 5, ErrorKind.CONTRACT_MISMATCH),
        (0, [0, 1, 2, 3], 10, ErrorKind.CONTRACT_MISMATCH),
    ],
    ids=["a gap", "wrong count", "too many"],
)
async def test_a_wrong_announcement_is_refused(
    bench: Bench, first_block: int, blocks: list[int], tokens: int, kind: ErrorKind
) -> None:
    ticket = await bench.worker.submit(decode_job(range(20, 30)))
    with pytest.raises(EpdError) as caught:
        bench.worker.kv_ready(ticket, first_block, bench.handle(blocks), tokens)
    assert caught.value.kind is kind
    bench.worker.close(ticket)


async def test_start_needs_all_kv_and_comes_once(bench: Bench) -> None:
    ticket = await bench.worker.submit(decode_job(range(20, 30)))
    bench.worker.kv_ready(ticket, 0, bench.handle([0]), 4)
    with pytest.raises(EpdError) as caught:
        bench.worker.begin(ticket, SampledToken(50), 10)
    assert caught.value.kind is ErrorKind.CONTRACT_MISMATCH
    with pytest.raises(EpdError, match="half-closed"):
        bench.worker.half_close(ticket)
    bench.worker.close(ticket)
    whole = await bench.join([20], max_tokens=3)
    with pytest.raises(EpdError, match="twice"):
        bench.worker.begin(whole, SampledToken(50), 1)
    await drain(whole)
    bench.worker.close(whole)


async def test_one_bad_sequence_fails_alone(bench: Bench) -> None:
    bench.lm.gate.clear()
    good = await bench.join([20], first=60, max_tokens=6)
    bad = await bench.join([20], first=POISON - 2, max_tokens=6)
    bench.lm.gate.set()
    assert isinstance((await drain(good))[-1], Finished)
    with pytest.raises(EpdError) as caught:
        await drain(bad)
    assert caught.value.kind is ErrorKind.INTERNAL
    bench.worker.close(good)
    bench.worker.close(bad)


async def test_blocks_that_reads_write_into_stay_until_the_reads_end(bench: Bench) -> None:
    bench.memory.engine.gate.clear()
    ticket = await bench.join(range(20, 30))
    await until(lambda: bench.memory.engine.readers)
    bench.worker.close(ticket)
    await a_moment()
    assert bench.used == 4
    bench.memory.engine.gate.set()
    await until(lambda: bench.used == 0)


async def test_cancel_says_when_no_read_is_under_way(bench: Bench) -> None:
    bench.memory.engine.gate.clear()
    ticket = await bench.join(range(20, 30))
    await until(lambda: bench.memory.engine.readers)
    bench.worker.cancel(ticket)
    waiting = asyncio.create_task(drain(ticket))
    await a_moment()
    assert not waiting.done()
    bench.memory.engine.gate.set()
    assert (await waiting)[-1] == ReadsTerminal(True)
    bench.worker.close(ticket)


async def test_blocks_of_a_running_step_are_freed_after_it(bench: Bench) -> None:
    bench.lm.gate.clear()
    ticket = await bench.join([20] * 4)
    await until(lambda: bench.worker.steps.in_step)
    bench.worker.close(ticket)
    assert bench.used == 2
    bench.lm.gate.set()
    await until(lambda: bench.used == 0)


async def test_a_pushed_out_sequence_ends_retryably_with_all_its_tokens() -> None:
    """16 blocks, and two sequences that grow to 14 each."""
    bench = Bench()
    bench.lm.gate.clear()
    older = await bench.join([20] * 4, max_tokens=50, arrival_ms=1)
    younger = await bench.join([20] * 4, max_tokens=50, arrival_ms=2)
    bench.lm.gate.set()
    events: list[Any] = []
    with pytest.raises(EpdError) as caught:
        await drain(younger, into=events)
    assert caught.value.kind is ErrorKind.OVERLOADED
    made = [e.token.id for e in events if isinstance(e, TokenMade)]
    assert made == list(range(51, 51 + len(made)))
    assert len(made) > 10
    bench.worker.close(younger)
    assert (await drain(older))[-1].output_tokens == 50
    bench.worker.close(older)
    await bench.close()


async def test_a_closed_reader_that_is_pushed_out_harms_nobody() -> None:
    """Its stream is over, its read is not, and its blocks are wanted."""
    bench = Bench()
    older = await bench.join([20] * 4, max_tokens=55, arrival_ms=1)
    await until(lambda: older.sampler.num_output)
    bench.lm.gate.clear()  # so that it can't be done before the younger comes
    bench.memory.engine.gate.clear()
    younger = await bench.join([20] * 8, max_tokens=20, arrival_ms=2)
    await until(lambda: bench.memory.engine.readers)
    bench.worker.close(younger)
    bench.lm.gate.set()
    draining = asyncio.create_task(drain(older))
    await a_moment(0.3)
    assert not draining.done(), "it needs a block that a read still writes into"
    bench.memory.engine.gate.set()
    assert (await draining)[-1].output_tokens == 55
    bench.worker.close(older)
    await bench.close()


async def test_who_comes_or_leaves_during_a_step_is_in_the_next_one_or_not(bench: Bench) -> None:
    """Although that was planned before."""
    bench.lm.gate.clear()
    first = await bench.join([20], first=30, max_tokens=9)
    await until(lambda: bench.worker.steps.in_step)
    second = await bench.join([20], first=60, max_tokens=9)
    third = await bench.join([20], first=70, max_tokens=9)
    await until(lambda: bench.worker.load().running == 3 and third.fetched)
    bench.worker.close(second)
    bench.lm.gate.set()
    for ticket in (first, third):
        assert isinstance((await drain(ticket))[-1], Finished)
        bench.worker.close(ticket)
    assert bench.lm.batches[:2] == [[30], [31, 70]]


async def test_nothing_is_computed_beyond_an_output_s_end(bench: Bench) -> None:
    """Be it foreseen or not: a stop id ends the shorter one."""
    bench.lm.gate.clear()
    longer = await bench.join([20], first=30, max_tokens=6)
    shorter = await bench.join([20], first=60, max_tokens=9, stops=[63])
    await until(lambda: bench.worker.steps.in_step)
    bench.lm.gate.set()
    assert (await drain(longer))[-1].output_tokens == 6
    assert (await drain(shorter))[-1].reason is FinishReason.STOP
    fed = [token for batch in bench.lm.batches for token in batch]
    assert sorted(fed) == [30, 31, 32, 33, 34, 60, 61, 62]
    for ticket in (longer, shorter):
        bench.worker.close(ticket)
