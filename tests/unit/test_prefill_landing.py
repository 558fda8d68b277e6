"""Landing memory in prefill's worker: pictures that stay, and reads that requests share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from torch import Tensor

from epd.errors import EpdError, ErrorKind
from epd.jobs import ImageItem
from epd.pages import touched
from prefill.ticket import Admitted, EmbeddingFetched, FirstToken, ReadsTerminal, Ticket
from tests.uncollected import uncollected
from tests.unit.fake_stage import IMAGE, prefill_job
from tests.unit.prefill_bench import Bench, announced, image, in_step, until_event
from tests.waiting import LIMIT_S, a_moment, until

ROWS = 3
NBYTES = ROWS * 16


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench(prefill__prefix_cache=False)
    yield made
    await made.close()


_ENCODERS: list[Tensor] = []
"""Handles know addresses only: memory that was announced must live on."""


def source(value: int) -> Tensor:
    """An encoder's memory."""
    rows = touched(4096)
    rows[:] = value
    _ENCODERS.append(rows)
    return rows


async def submit(bench: Bench, *items: ImageItem) -> Ticket:
    ids = [20, *[IMAGE] * ROWS * len(items), 21]
    return await bench.worker.submit(prefill_job(ids, items=items))


async def admitted(ticket: Ticket) -> Admitted:
    (event,) = await until_event(ticket, Admitted)
    assert isinstance(event, Admitted)
    return event


def landed(bench: Bench, ticket: Ticket, index: int = 0) -> list[int]:
    """What lies in the place of this image."""
    view = bench.worker._landing.arena.view(ticket.landing[index].extent)
    return sorted(set(view.tolist()))


async def finish(bench: Bench, ticket: Ticket) -> list[Any]:
    events = await until_event(ticket, FirstToken)
    bench.worker.close(ticket, clean=True)
    return events


async def fetched(events: list[Any]) -> int:
    return sum(e.transfer_bytes for e in events if isinstance(e, EmbeddingFetched))


async def test_a_picture_that_landed_is_not_asked_for_again(bench: Bench) -> None:
    first = await submit(bench, image(ROWS))
    assert (await admitted(first)).missing_items == (0,)
    bench.worker.embedding_ready(first, 0, announced(bench, source(7)))
    await finish(bench, first)
    second = await submit(bench, image(ROWS))
    assert (await admitted(second)).missing_items == ()
    assert landed(bench, second) == [7]
    with pytest.raises(EpdError, match="not missing"):
        bench.worker.embedding_ready(second, 0, announced(bench, source(7)))
    bench.worker.half_close(second)  # early: nothing is missing
    await finish(bench, second)
    state = bench.worker.state()
    assert (state["embeddings_cached"], state["embeddings_pinned"]) == (1, 0)
    assert state["arena_bytes_used"] == 0


async def test_nothing_is_kept_of_a_request_that_left_while_it_read(bench: Bench) -> None:
    bench.memory.engine.gate.clear()
    with uncollected(Ticket) as alive:
        ticket = await submit(bench, image(ROWS))
        await admitted(ticket)
        bench.worker.embedding_ready(ticket, 0, announced(bench, source(7)))
        await until(lambda: bench.memory.engine.readers)
        bench.worker.close(ticket, clean=False)
        del ticket
        bench.memory.engine.gate.set()
        await until(lambda: not alive(), limit_s=10)


async def test_another_picture_or_tenant_never_hits(bench: Bench) -> None:
    first = await submit(bench, image(ROWS, "a"))
    await admitted(first)
    bench.worker.embedding_ready(first, 0, announced(bench, source(7)))
    await finish(bench, first)
    other = await submit(bench, image(ROWS, "b"))  # a tenant's digest is another, too
    assert (await admitted(other)).missing_items == (0,)
    bench.worker.close(other, clean=True)


async def test_two_requests_share_one_read(bench: Bench) -> None:
    first, second = await submit(bench, image(ROWS)), await submit(bench, image(ROWS))
    assert (await admitted(first)).missing_items == (await admitted(second)).missing_items == (0,)
    bench.memory.engine.gate.clear()
    bench.worker.embedding_ready(first, 0, announced(bench, source(7)))
    bench.worker.embedding_ready(second, 0, announced(bench, source(8)))
    await until(lambda: bench.memory.engine.readers)
    bench.memory.engine.gate.set()
    events = await finish(bench, first), await finish(bench, second)
    moved = [await fetched(found) for found in events]
    assert moved == [NBYTES, 0]


async def test_the_second_waits_for_its_own_announcement(bench: Bench) -> None:
    """Else its gateway would still wait for an encoder when the request is done."""
    first, second = await submit(bench, image(ROWS)), await submit(bench, image(ROWS))
    await admitted(second)
    bench.worker.embedding_ready(first, 0, announced(bench, source(7)))
    await finish(bench, first)
    await a_moment()
    assert not second.told_last
    bench.worker.embedding_ready(second, 0, announced(bench, source(7)))
    assert await fetched(await finish(bench, second)) == 0


@pytest.mark.parametrize("how", ["cancelled", "closed", "lost"])
async def test_when_the_reader_goes_away_the_next_one_reads_for_itself(
    bench: Bench, how: str
) -> None:
    """And not before the first read is over: its source is somebody else's by then."""
    first, second = await submit(bench, image(ROWS)), await submit(bench, image(ROWS))
    await admitted(first)
    await admitted(second)
    bench.memory.engine.gate.clear()
    theirs = source(7)
    bench.worker.embedding_ready(first, 0, announced(bench, theirs))
    bench.worker.embedding_ready(second, 0, announced(bench, source(8)))
    await until(lambda: bench.memory.engine.readers)
    if how == "cancelled":
        bench.worker.cancel(first)
    else:
        bench.worker.close(first, clean=how == "closed")
    theirs[:] = 99  # the encoder has reused it
    await a_moment()
    bench.memory.engine.gate.set()
    events: list[Any] = []
    async with asyncio.timeout(LIMIT_S):
        while not second.told_last:
            events += await second.events.take()
            if second.landing:
                content = landed(bench, second)
    assert content == [8]
    assert await fetched(events) == NBYTES
    bench.worker.close(second, clean=True)
    if how == "cancelled":
        await until_event(first, ReadsTerminal)
        bench.worker.close(first, clean=True)


async def test_when_the_reader_fails_only_it_fails(bench: Bench) -> None:
    first, second = await submit(bench, image(ROWS)), await submit(bench, image(ROWS))
    await admitted(first)
    await admitted(second)
    bench.memory.engine.gate.clear()
    damaged = source(7)
    bench.worker.embedding_ready(first, 0, announced(bench, damaged))
    damaged[0] = 1
    bench.worker.embedding_ready(second, 0, announced(bench, source(8)))
    await until(lambda: bench.memory.engine.readers)
    bench.memory.engine.gate.set()
    with pytest.raises(EpdError) as caught:
        await until_event(first, FirstToken)
    assert caught.value.kind is ErrorKind.CHECKSUM_MISMATCH
    bench.worker.close(first, clean=True)
    assert await fetched(await finish(bench, second)) == NBYTES
    third = await submit(bench, image(ROWS))
    assert (await admitted(third)).missing_items == ()
    assert landed(bench, third) == [8]
    await finish(bench, third)


async def test_one_picture_twice_in_a_request_is_asked_for_once(bench: Bench) -> None:
    ticket = await submit(bench, image(ROWS, "a", 0, 2), image(ROWS, "a", 1, 2))
    assert (await admitted(ticket)).missing_items == (0,)
    bench.worker.embedding_ready(ticket, 0, announced(bench, source(7)))
    assert await fetched(await finish(bench, ticket)) == NBYTES
    assert bench.lm.batches[-1] == [*[IMAGE] * 2 * ROWS, 21]


async def test_requests_with_one_picture_fit_where_copies_would_not() -> None:
    """1 MiB of landing memory, a picture of 600 KiB, and three requests with it."""
    bench = Bench(prefill__prefix_cache=False, kv__prefill_tokens=1 << 20)
    rows = 600 * 1024 // 16
    tickets = [
        await bench.worker.submit(prefill_job([20, *[IMAGE] * rows, 21], items=(image(rows),)))
        for _ in range(3)
    ]
    for ticket in tickets:
        assert (await admitted(ticket)).missing_items == (0,)
    for ticket in tickets:
        bench.worker.close(ticket, clean=True)
    await bench.close()


async def test_switched_off_each_request_reads_for_itself() -> None:
    bench = Bench(prefill__prefix_cache=False, prefill__embedding_cache=False)
    for value in (7, 8):
        ticket = await submit(bench, image(ROWS))
        assert (await admitted(ticket)).missing_items == (0,)
        bench.worker.embedding_ready(ticket, 0, announced(bench, source(value)))
        assert await fetched(await finish(bench, ticket)) == NBYTES
    assert bench.worker.state()["embeddings_cached"] == 0
    await bench.close()


async def test_a_request_is_admitted_and_its_picture_read_while_a_step_runs(bench: Bench) -> None:
    """Encoding and reading need not wait for the chunk of somebody else."""
    bench.lm.gate.clear()
    busy = await bench.worker.submit(prefill_job([20, 21]))
    await in_step(busy)
    ticket = await submit(bench, image(ROWS))
    assert (await admitted(ticket)).missing_items == (0,)
    bench.worker.embedding_ready(ticket, 0, announced(bench, source(7)))
    assert await fetched(await until_event(ticket, EmbeddingFetched)) == NBYTES
    assert busy.in_step, "all of this was during its step"
    bench.lm.gate.set()
    await finish(bench, busy)
    await finish(bench, ticket)
