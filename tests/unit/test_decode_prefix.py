"""Decode's prefix cache in its worker: only the blocks that lack are read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch

from decode.ticket import Admitted, Finished, KvFetched, TokenMade
from epd.errors import EpdError, ErrorKind, invalid
from epd.jobs import ImageItem, SampledToken
from tests.unit.decode_bench import Bench, drain
from tests.unit.fake_stage import BLOCK, IMAGE, decode_job
from tests.waiting import a_moment, until


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    await made.close()
    check_content(made, {})


def check_content(bench: Bench, expected: dict[int, list[int]]) -> None:
    """What cached blocks hold is finished: no zeros, and what the test says."""
    for block in bench.kv.prefix._entries:
        held = bench.kv.pool.k(0)[block, :, 0, 0].tolist()
        assert 0 not in held
        assert held == expected.get(block, held)


async def ask(bench: Bench, ids: Sequence[int], **job: Any) -> tuple[int, int, list[int]]:
    """A whole request: (cached tokens, blocks read, output ids)."""
    first = ids[-1] + 1
    ticket = await bench.join(ids, first, **job)
    events = await drain(ticket)
    bench.worker.close(ticket)
    assert isinstance(events[-1], Finished)
    admitted = next(event for event in events if isinstance(event, Admitted))
    fetched = next(event for event in events if isinstance(event, KvFetched))
    read = fetched.transfer_bytes / bench.owner.layout.block_bytes
    assert read == -(-len(ids) // BLOCK) - admitted.cached_tokens // BLOCK
    output = [first, *(event.token.id for event in events if isinstance(event, TokenMade))]
    return admitted.cached_tokens, int(read), output


@pytest.mark.parametrize(("length", "found"), [(3, 0), (4, 4), (5, 4), (8, 8), (9, 8)])
async def test_the_same_prompt_again_reads_what_lacks_and_may_be_nothing(
    bench: Bench, length: int, found: int
) -> None:
    ids = list(range(20, 20 + length))
    assert (await ask(bench, ids))[0] == 0
    again = await ask(bench, ids)
    assert again[:2] == (found, -(-length // BLOCK) - found // BLOCK)
    assert again[2] == list(range(20 + length, 28 + length))


async def test_a_hundred_times_the_same(bench: Bench) -> None:
    ids = list(range(20, 28))
    for turn in range(100):
        assert (await ask(bench, ids))[:2] == ((8, 0) if turn else (0, 2))
    assert bench.used == 0


async def test_a_full_hit_needs_no_word_of_prefill_but_start(bench: Bench) -> None:
    """Nothing to read: fetched is said as soon as places are reserved."""
    ids = list(range(20, 28))
    await ask(bench, ids)
    ticket = await bench.worker.submit(decode_job(ids))
    bench.worker.kv_ready(ticket, 0, bench.handle([0]), 4)
    await until(lambda: ticket.fetched)
    with pytest.raises(EpdError, match="kv_tokens"):
        bench.worker.begin(ticket, SampledToken(28), 8)
    bench.worker.kv_ready(ticket, 1, bench.handle([1]), 8)
    bench.worker.begin(ticket, SampledToken(28), 8)
    assert isinstance((await drain(ticket))[-1], Finished)
    bench.worker.close(ticket)


async def test_the_next_turn_reads_neither_the_prompt_nor_the_answer(bench: Bench) -> None:
    """10 of prompt, 8 of output (the last has no KV): 17 tokens, four full blocks."""
    _, _, output = await ask(bench, range(20, 30))
    turn = [*range(20, 30), *output, 60, 61]
    assert (await ask(bench, turn))[:2] == (16, 1)
    assert bench.kv.blocks.kept >= 5


async def test_generated_blocks_hold_what_prefill_would_compute(bench: Bench) -> None:
    _, _, output = await ask(bench, range(20, 30), max_tokens=12)
    ids = [*range(20, 30), *output]
    chained = bench.kv.chain(ids, (), image_token_id=IMAGE, prompt_length=10, salt=b"").hashes
    found = bench.kv.prefix._longest(chained)
    assert len(found) == 21 // BLOCK
    check_content(bench, {b: ids[i * BLOCK : (i + 1) * BLOCK] for i, b in enumerate(found)})


async def test_blocks_announced_in_pieces_are_read_from_where_the_cache_ends(
    bench: Bench,
) -> None:
    ids = list(range(20, 34))
    await ask(bench, ids[:7], max_tokens=2)
    bench.compute(ids)
    ticket = await bench.worker.submit(decode_job(ids, max_tokens=2))
    bench.worker.kv_ready(ticket, 0, bench.handle([0, 1, 2]), 12)
    bench.worker.kv_ready(ticket, 3, bench.handle([3]), 14)
    bench.worker.begin(ticket, SampledToken(34), 14)
    events = await drain(ticket)
    assert ticket.transfer_bytes == 2 * bench.owner.layout.block_bytes, "8 cached by then"
    assert events[0] == Admitted(8)
    bench.worker.close(ticket)


async def test_choices_of_one_prompt_share_what_the_first_has_read(bench: Bench) -> None:
    ids = list(range(20, 30))
    bench.lm.gate.clear()
    first = await bench.join(ids, 30)
    await until(lambda: first.fetched)
    second = await bench.join(ids, 40)
    await until(lambda: second.fetched)
    assert second.transfer_bytes == bench.owner.layout.block_bytes, "its own last block"
    bench.lm.gate.set()
    ours, theirs = await drain(first), await drain(second)
    assert [e.token.id for e in ours if isinstance(e, TokenMade)] == list(range(31, 38))
    assert [e.token.id for e in theirs if isinstance(e, TokenMade)] == list(range(41, 48))
    bench.worker.close(first)
    bench.worker.close(second)


async def test_places_that_were_not_needed_go_to_whoever_waits(bench: Bench) -> None:
    """Of 16 blocks two of one prompt take 14 while one of them is read, and 8 after it."""
    ids = list(range(20, 44))
    bench.compute(ids)
    bench.compute(range(60, 70), at=8)
    bench.memory.engine.gate.clear()
    both = [await bench.worker.submit(decode_job(ids)) for _ in range(2)]
    for ticket in both:
        bench.worker.kv_ready(ticket, 0, bench.handle(range(6)), 24)
    other = await bench.worker.submit(decode_job(range(60, 70)))
    bench.worker.kv_ready(other, 0, bench.handle([8, 9, 10]), 10)
    await a_moment()
    assert other.loader is None, "no room yet"
    bench.memory.engine.gate.set()
    await until(lambda: other.loader is not None)
    for ticket in (*both, other):
        bench.worker.close(ticket)


async def test_tenants_and_images_never_share(bench: Bench) -> None:
    ids = [20, IMAGE, IMAGE, 21, 22]

    def items(name: bytes) -> tuple[ImageItem, ...]:
        return (ImageItem(0, name * 32, 2, (), 8, 8, 1),)

    assert (await ask(bench, ids, items=items(b"a")))[0] == 0
    assert (await ask(bench, ids, items=items(b"b")))[0] == 0
    assert (await ask(bench, ids, items=items(b"a"), salt=b"tenant"))[0] == 0
    assert (await ask(bench, ids, items=items(b"a")))[0] == 4


async def test_bytes_that_fail_their_check_are_not_kept(bench: Bench) -> None:
    ids = list(range(20, 28))
    bench.compute(ids)
    ticket = await bench.worker.submit(decode_job(ids))
    good, bad = bench.handle([0]), bench.handle([1])
    bench.owner.k(0)[1] = 77
    bench.worker.kv_ready(ticket, 0, good, 4)
    bench.worker.kv_ready(ticket, 1, bad, 8)
    with pytest.raises(EpdError) as caught:
        await drain(ticket)
    assert caught.value.kind is ErrorKind.CHECKSUM_MISMATCH
    bench.worker.close(ticket)
    assert (await ask(bench, ids))[:2] == (4, 1)


async def test_a_read_that_was_given_up_leaves_nothing_behind(bench: Bench) -> None:
    ids = list(range(20, 28))
    bench.memory.engine.gate.clear()
    ticket = await bench.join(ids)
    await until(lambda: bench.memory.engine.readers)
    bench.worker.cancel(ticket)
    bench.memory.engine.gate.set()
    await drain(ticket)
    bench.worker.close(ticket)
    assert bench.kv.blocks.kept == 0
    assert (await ask(bench, ids))[:2] == (0, 2)


async def test_what_a_failed_sequence_computed_is_not_spread(bench: Bench) -> None:
    ids = list(range(20, 28))
    await ask(bench, ids)
    forward = bench.lm.forward
    bench.lm.forward = lambda *work: forward(*work) * torch.nan  # type: ignore[method-assign]
    ticket = await bench.join(ids)
    with pytest.raises(EpdError):
        await drain(ticket)
    bench.worker.close(ticket)
    bench.lm.forward = forward  # type: ignore[method-assign]
    assert (await ask(bench, ids))[0] == 0


async def test_a_fault_of_the_users_leaves_the_cache_to_the_others(bench: Bench) -> None:
    ids = list(range(20, 28))
    await ask(bench, ids)
    fault = invalid("grammar: allows nothing", "grammar")
    with patch.object(bench.worker._runner._sampler, "sample", lambda *_: [fault]):
        ticket = await bench.join(ids)
        with pytest.raises(EpdError):
            await drain(ticket)
        bench.worker.close(ticket)
    assert (await ask(bench, ids))[0] == 8


async def test_a_sequence_that_gave_way_reads_only_what_was_taken_from_it() -> None:
    """Pool of 16 blocks: the older needs 13 of them, the younger comes again after it."""
    bench = Bench()
    bench.lm.gate.clear()
    older = await bench.join(list(range(20, 24)), 24, max_tokens=48, arrival_ms=1)
    younger = await bench.join([60, 61, 62, 63], 64, max_tokens=32, arrival_ms=2)
    bench.lm.gate.set()
    events: list[Any] = []
    with pytest.raises(EpdError) as caught:
        await drain(younger, into=events)
    assert caught.value.kind is ErrorKind.OVERLOADED
    bench.worker.close(younger)
    output = [64, *(e.token.id for e in events if isinstance(e, TokenMade))]
    await drain(older)
    bench.worker.close(older)
    ids = [60, 61, 62, 63, *output]
    cached, read, rest = await ask(bench, ids, prompt=4, max_tokens=32, arrival_ms=2)
    assert cached > 0
    assert read < -(-len(ids) // BLOCK)
    assert [*output, *rest] == list(range(64, 96))
    await bench.close()


async def test_switched_off_every_block_is_read() -> None:
    bench = Bench(decode__prefix_cache=False)
    ids = list(range(20, 30))
    assert [(await ask(bench, ids))[:2] for _ in range(2)] == [(0, 3), (0, 3)]
    assert bench.kv.blocks.kept == 0
    await bench.close()


async def test_blocks_are_read_while_a_step_runs(bench: Bench) -> None:
    """A newcomer is ready when the step ends, not a transfer later."""
    bench.lm.gate.clear()
    running = await bench.join([20, 21, 22])
    await until(lambda: bench.worker.steps.in_step)
    newcomer = await bench.join(list(range(40, 50)))
    await until(lambda: newcomer.fetched)
    assert bench.worker.steps.in_step
    assert bench.worker.steps.steps == 0
    bench.lm.gate.set()
    for ticket in (running, newcomer):
        await drain(ticket)
        bench.worker.close(ticket)


async def three_at_once(bench: Bench, ids: list[int]) -> list[Any]:
    """Choices of one prompt: their reads are all under way when this returns."""
    bench.memory.engine.gate.clear()
    tickets = [await bench.join(ids, 60 + n, max_tokens=3) for n in range(3)]
    await until(lambda: bench.memory.engine.readers == 3)
    return tickets


async def finished(bench: Bench, ticket: Any) -> tuple[float, list[int]]:
    """(blocks that it read, ids that it made)."""
    events = await drain(ticket)
    bench.worker.close(ticket)
    made = [event.token.id for event in events if isinstance(event, TokenMade)]
    return ticket.transfer_bytes / bench.owner.layout.block_bytes, made


async def test_choices_that_begin_together_share_one_read(bench: Bench) -> None:
    tickets = await three_at_once(bench, list(range(20, 30)))
    bench.memory.engine.gate.set()
    results = [await finished(bench, ticket) for ticket in tickets]
    assert [read for read, _ in results] == [3, 1, 1], "each its own last block"
    assert [made for _, made in results] == [[61, 62], [62, 63], [63, 64]]


@pytest.mark.parametrize("how", ["cancelled", "closed", "damaged"])
async def test_when_the_reader_comes_to_nothing_the_others_read(bench: Bench, how: str) -> None:
    ids = list(range(20, 30))
    tickets = await three_at_once(bench, ids)
    if how == "cancelled":
        bench.worker.cancel(tickets[0])
    elif how == "closed":
        bench.worker.close(tickets[0])
    else:
        bench.owner.k(0)[1] = 77  # the first one's source only
    bench.memory.engine.gate.set()
    if how == "damaged":
        with pytest.raises(EpdError):
            await drain(tickets[0])
    elif how == "cancelled":
        await drain(tickets[0])
    bench.worker.close(tickets[0])
    results = [await finished(bench, ticket) for ticket in tickets[1:]]
    assert sorted(read for read, _ in results) == [1, 3]
    assert [made for _, made in results] == [[62, 63], [63, 64]]
    chained = bench.kv.chain(ids, (), image_token_id=IMAGE, prompt_length=10, salt=b"").hashes
    found = bench.kv.prefix._longest(chained)
    check_content(bench, {b: ids[i * BLOCK : (i + 1) * BLOCK] for i, b in enumerate(found)})
    assert len(found) == 2


async def test_switched_off_choices_read_each_for_itself() -> None:
    bench = Bench(decode__prefix_cache=False)
    tickets = await three_at_once(bench, list(range(20, 30)))
    bench.memory.engine.gate.set()
    assert [(await finished(bench, ticket))[0] for ticket in tickets] == [3, 3, 3]
    await bench.close()
