"""Prefill's prefix cache in its worker: what is found, computed, announced and given back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import patch

import pytest
import torch

from epd.errors import EpdError, invalid
from epd.pages import touched
from epd.transfer.checksum import verify_at
from prefill.ticket import Admitted, FirstToken, KvReady, ReadsTerminal, Ticket
from tests.unit.fake_stage import BLOCK, IMAGE, prefill_job
from tests.unit.prefill_bench import Bench, announced, image, in_step, until_event
from tests.waiting import a_moment


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    await made.close()


async def ask(bench: Bench, ids: Any, *, lost: bool = False, **job: Any) -> list[Any]:
    """A whole request; its events."""
    ticket = await bench.worker.submit(prefill_job(ids, **job))
    events = await until_event(ticket, FirstToken)
    check_announced(bench, ticket, events)
    bench.worker.close(ticket, clean=not lost)
    return events


def check_announced(bench: Bench, ticket: Ticket, events: list[Any]) -> None:
    """Every block was announced once, in order, and holds what its sum and ids say."""
    ready = [event for event in events if isinstance(event, KvReady)]
    if not ticket.job.decode_follows:
        assert not ready
        return
    spans = [span for event in ready for span in event.handle.spans]
    assert len(spans) == -(-ticket.total // BLOCK)
    assert ready[-1].tokens == ticket.total
    for number, (block, span) in enumerate(zip(ticket.blocks, spans, strict=True)):
        assert span.address == bench.kv.pool.address(block)
        verify_at(span.address, span.length, span.checksum, f"block {number}")
        ids = ticket.job.token_ids[number * BLOCK : (number + 1) * BLOCK]
        assert bench.kv.pool.k(0)[block, : len(ids), 0, 0].tolist() == list(ids)


def cached(events: list[Any]) -> int:
    return int(next(e for e in events if isinstance(e, Admitted)).cached_tokens)


@pytest.mark.parametrize(("length", "found"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
async def test_the_same_prompt_again_computes_its_end_only(
    bench: Bench, length: int, found: int
) -> None:
    """Never less than the last token, though the prompt fills its blocks exactly."""
    ids = list(range(20, 20 + length))
    first = await ask(bench, ids)
    again = await ask(bench, ids)
    assert (cached(first), cached(again)) == (0, found)
    assert again[-1].token.id == first[-1].token.id == ids[-1] + 1
    assert bench.lm.batches == [ids, ids[found:]]


async def test_a_hundred_times_the_same(bench: Bench) -> None:
    ids = list(range(20, 28))
    for turn in range(100):
        assert cached(await ask(bench, ids)) == (4 if turn else 0)
    assert bench.used == 0


async def test_cached_blocks_are_announced_before_the_first_step(bench: Bench) -> None:
    ids = list(range(20, 29))
    await ask(bench, ids)
    bench.lm.gate.clear()
    ticket = await bench.worker.submit(prefill_job(ids))
    ready = (await until_event(ticket, KvReady))[-1]
    assert (ready.first_block, len(ready.handle.spans), ready.tokens) == (0, 2, 8)
    assert ticket.in_step
    bench.lm.gate.set()
    events = [ready, *await until_event(ticket, FirstToken)]
    check_announced(bench, ticket, events)
    bench.worker.close(ticket, clean=True)


async def test_only_the_common_start_is_found(bench: Bench) -> None:
    await ask(bench, [20, 21, 22, 23, 24, 25, 26, 27, 28])
    assert cached(await ask(bench, [20, 21, 22, 23, 24, 25, 26, 99, 28])) == 4
    assert cached(await ask(bench, [20, 21, 22, 99, 24, 25, 26, 27, 28])) == 0


async def test_the_next_turn_finds_the_whole_last_one(bench: Bench) -> None:
    first = list(range(20, 31))
    await ask(bench, first)
    assert cached(await ask(bench, [*first, *range(31, 40)])) == 8


async def test_tenants_never_share(bench: Bench) -> None:
    ids = list(range(20, 30))
    await ask(bench, ids, salt=b"one")
    assert cached(await ask(bench, ids, salt=b"two")) == 0
    assert cached(await ask(bench, ids)) == 0
    assert cached(await ask(bench, ids, salt=b"one")) == 8


async def test_generated_ids_that_are_prefilled_again_are_found(bench: Bench) -> None:
    """After a preemption: the prompt and what was generated, a placeholder among it."""
    await ask(bench, range(20, 30))
    ids = [*range(20, 30), 30, 31, IMAGE, 33, 34]
    assert cached(await ask(bench, ids, prompt=10)) == 8
    assert cached(await ask(bench, [*ids, 35, 36], prompt=10)) == 12


async def with_image(bench: Bench, ids: list[int], name: str) -> list[Any]:
    """A request whose image prefill may or may not ask for."""
    items = (image(3, name),)
    ticket = await bench.worker.submit(prefill_job(ids, items=items))
    events = await until_event(ticket, Admitted)
    for index in events[0].missing_items:
        rows = touched(4096)
        bench.worker.embedding_ready(ticket, index, announced(bench, rows))
    events += await until_event(ticket, FirstToken)
    bench.worker.close(ticket, clean=True)
    return events


async def test_an_image_inside_the_cached_prefix_is_not_asked_for(bench: Bench) -> None:
    ids = [20, IMAGE, IMAGE, IMAGE, 21, 22, 23]
    first = await with_image(bench, ids, "a")
    again = await with_image(bench, ids, "a")
    assert (first[0].missing_items, again[0].missing_items) == ((0,), ())
    assert again[0].cached_tokens == 4


async def test_another_image_of_the_same_size_never_hits(bench: Bench) -> None:
    ids = [20, 21, 22, 23, 24, IMAGE, IMAGE, IMAGE, 25]
    await with_image(bench, ids, "a")
    other = await with_image(bench, ids, "b")
    assert other[0].cached_tokens == 4, "the text before it, no more"
    assert other[0].missing_items == (0,)


async def test_a_hit_that_ends_inside_an_image_needs_that_image(bench: Bench) -> None:
    """All its rows, though only the last is used: they are one announcement."""
    ids = [20, 21, IMAGE, IMAGE, IMAGE, 25]
    await with_image(bench, ids, "a")
    again = await with_image(bench, ids, "a")
    assert (again[0].cached_tokens, again[0].missing_items) == (4, ())  # landed before
    assert bench.lm.batches[-1] == [IMAGE, 25]
    bench.worker._landing._table._evict()
    again = await with_image(bench, ids, "a")
    assert (again[0].cached_tokens, again[0].missing_items) == (4, (0,))
    assert bench.lm.batches[-1] == [IMAGE, 25]


async def test_several_choices_start_from_one_cached_prefix(bench: Bench) -> None:
    ids = list(range(20, 30))
    await ask(bench, ids)
    events = await ask(bench, ids, choices=3)
    assert cached(events) == 8
    assert [other.token.id for other in events[-1].others] == [30, 30]


async def test_without_decode_blocks_are_kept_too_and_can_be_announced_later(
    bench: Bench,
) -> None:
    ids = list(range(20, 30))
    await ask(bench, ids, max_tokens=1, follows=False)
    assert bench.used == 0
    assert cached(await ask(bench, ids)) == 8


async def test_what_a_cancelled_request_computed_stays(bench: Bench) -> None:
    ids = list(range(20, 30))
    bench.lm.gate.clear()
    ticket = await bench.worker.submit(prefill_job(ids))
    await in_step(ticket)
    bench.worker.cancel(ticket)
    bench.lm.gate.set()
    await until_event(ticket, ReadsTerminal)
    bench.worker.close(ticket, clean=True)
    assert cached(await ask(bench, ids)) == 8


@pytest.mark.parametrize(("damaged", "found"), [(False, 8), (True, 0)])
async def test_blocks_that_a_reader_found_damaged_are_given_to_nobody_again(
    bench: Bench, damaged: bool, found: int
) -> None:
    ids = list(range(20, 30))
    ticket = await bench.worker.submit(prefill_job(ids))
    await until_event(ticket, FirstToken)
    bench.worker.cancel(ticket, damaged=damaged)
    await until_event(ticket, ReadsTerminal)
    bench.worker.close(ticket, clean=True)
    assert bench.used == 0
    assert cached(await ask(bench, ids)) == found


async def test_what_a_failed_request_computed_is_not_spread(bench: Bench) -> None:
    ids = list(range(20, 30))
    forward = bench.lm.forward
    bench.lm.forward = lambda *work: forward(*work) * torch.nan  # type: ignore[method-assign]
    with pytest.raises(EpdError):
        await ask(bench, ids)
    bench.lm.forward = forward  # type: ignore[method-assign]
    for ticket in list(bench.worker._tickets.values()):
        bench.worker.close(ticket, clean=True)
    assert cached(await ask(bench, ids)) == 0


async def test_a_fault_of_the_users_leaves_the_cache_to_the_others(bench: Bench) -> None:
    """E.g. a grammar that allows no token; it says nothing about what was computed."""
    ids = list(range(20, 29))
    await ask(bench, ids)
    fault = invalid("grammar: allows nothing", "grammar")
    with patch.object(bench.worker._runner._sampler, "sample", lambda *_: [fault]):
        ticket = await bench.worker.submit(prefill_job(ids))
        with pytest.raises(EpdError):
            await until_event(ticket, FirstToken)
        bench.worker.close(ticket, clean=True)
    again = await bench.worker.submit(prefill_job(ids))
    assert again.cached_tokens == 8
    await until_event(again, FirstToken)
    bench.worker.close(again, clean=True)


async def test_blocks_that_a_reader_found_damaged_are_given_to_nobody_else(bench: Bench) -> None:
    ids = list(range(20, 30))
    await ask(bench, ids)
    bench.kv.pool.k(0)[next(iter(bench.kv.prefix._entries))] = 99
    ticket = await bench.worker.submit(prefill_job(ids))
    await until_event(ticket, FirstToken)
    bench.worker.cancel(ticket, damaged=True)
    assert (await until_event(ticket, ReadsTerminal))[-1].clean
    bench.worker.close(ticket, clean=True)
    assert cached(await ask(bench, ids)) == 0
    assert cached(await ask(bench, ids)) == 8


async def test_what_a_step_makes_of_damaged_blocks_is_given_to_nobody_either(
    bench: Bench,
) -> None:
    """Damage is reported while the next chunk runs."""
    ids = list(range(20, 30))
    bench.lm.gate.clear()
    ticket = await bench.worker.submit(prefill_job(ids))
    await in_step(ticket)
    bench.worker.cancel(ticket, damaged=True)
    bench.lm.gate.set()
    await until_event(ticket, ReadsTerminal)
    bench.worker.close(ticket, clean=True)
    assert len(bench.kv.prefix) == 0


async def test_lost_readers_of_a_shared_prefix_hold_it_and_it_is_still_found(
    bench: Bench,
) -> None:
    ids = list(range(20, 29))
    await ask(bench, ids, lost=True)
    assert cached(await ask(bench, ids, lost=True)) == 8
    assert cached(await ask(bench, ids)) == 8
    assert bench.used == 4, "two blocks of the prefix, and the last one of each lost reader"
    quarantined = bench.memory.leases.quarantined_bytes
    assert quarantined == 4 * bench.kv.layout.block_bytes, "what is shared counts once"
    # 16 blocks: with 12 free and none of these evictable, 13 can't be had.
    ticket = await bench.worker.submit(prefill_job([50] * 13 * BLOCK))
    await a_moment()
    assert not ticket.admitted
    bench.memory.now += 1.1
    bench.worker.tick()
    await until_event(ticket, FirstToken)
    bench.worker.close(ticket, clean=True)
    assert bench.used == 0


async def test_the_largest_request_fits_a_pool_full_of_cached_blocks(bench: Bench) -> None:
    for start in range(20, 60, 8):
        await ask(bench, range(start, start + 8))
    assert bench.kv.blocks.kept == 10
    assert cached(await ask(bench, [*range(20, 24), *[60] * 60])) == 4
    assert bench.kv.blocks.kept == 16


async def test_switched_off_every_prompt_is_computed_anew() -> None:
    bench = Bench(prefill__prefix_cache=False)
    ids = list(range(20, 30))
    assert [cached(await ask(bench, ids)) for _ in range(2)] == [0, 0]
    assert bench.lm.batches == [ids, ids]
    assert bench.kv.blocks.kept == 0
    await bench.close()
