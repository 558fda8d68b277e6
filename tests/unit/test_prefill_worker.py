"""The prefill worker's own logic, with a fake model and a fake transfer engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from epd.errors import EpdError, ErrorKind
from epd.jobs import FinishReason
from epd.pages import touched
from prefill.ticket import Admitted, EmbeddingFetched, FirstToken, KvReady, ReadsTerminal
from tests.unit.fake_stage import BLOCK, IMAGE, POISON, prefill_job
from tests.unit.prefill_bench import Bench, announced, image, in_step, until_event
from tests.waiting import a_moment, until


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    await made.close()


async def test_events_in_order_and_blocks_sealed_once(bench: Bench) -> None:
    ticket = await bench.worker.submit(prefill_job(range(20, 30)))
    events = await until_event(ticket, FirstToken)
    assert [type(e) for e in events] == [Admitted, KvReady, FirstToken]
    assert events[1].tokens == 10
    assert len(events[1].handle.spans) == 3
    assert events[2].token.id == 30
    assert events[2].kv_tokens == 10
    assert bench.used == 3
    bench.worker.close(ticket, clean=True)
    assert bench.used == 0


async def test_gateways_are_told_how_much_can_be_prefilled_again(bench: Bench) -> None:
    """Prompt and output: decode may push a request out just before its last token."""
    blocks = int(str(bench.worker.state()["kv_blocks"]))
    assert bench.worker.describe().max_context == blocks * BLOCK < 1000
    large = Bench(kv__prefill_tokens=4000)
    assert large.worker.describe().max_context == 1000, "the model's"
    await large.close()


async def test_a_pushed_out_request_comes_again_into_a_full_queue() -> None:
    bench = Bench(prefill__max_queue=1, prefill__max_queue_tokens=60)
    large = await bench.worker.submit(prefill_job([20] * 60))  # all of the pool
    waiting = await bench.worker.submit(prefill_job([21] * 60))
    with pytest.raises(EpdError, match=r"prefill\.max_queue"):
        await bench.worker.submit(prefill_job([20] * 10))
    again = await bench.worker.submit(prefill_job([20] * 10, prompt=8))
    for ticket in (large, waiting, again):
        bench.worker.close(ticket, clean=True)
    await bench.close()


async def test_one_bad_request_fails_alone_and_the_worker_goes_on(bench: Bench) -> None:
    bench.lm.gate.clear()
    blocker = await bench.worker.submit(prefill_job([1]))
    await in_step(blocker)  # so that the next two share a batch
    good = await bench.worker.submit(prefill_job([20, 21]))
    bad = await bench.worker.submit(prefill_job([20, POISON]))
    bench.lm.gate.set()
    assert (await until_event(good, FirstToken))[-1].token.id == 22
    with pytest.raises(EpdError) as caught:
        await until_event(bad, FirstToken)
    assert caught.value.kind is ErrorKind.INTERNAL
    assert [20, 21, 20, POISON] in bench.lm.batches
    after = await bench.worker.submit(prefill_job([50]))
    assert (await until_event(after, FirstToken))[-1].token.id == 51
    for ticket in (blocker, good, bad, after):
        bench.worker.close(ticket, clean=True)


async def test_blocks_of_a_running_step_are_freed_after_it(bench: Bench) -> None:
    bench.lm.gate.clear()
    ticket = await bench.worker.submit(prefill_job(range(20, 30)))
    await in_step(ticket)
    bench.worker.close(ticket, clean=False)
    await a_moment()
    assert bench.used == 3
    bench.lm.gate.set()
    await until(lambda: not bench.worker.steps.in_step)
    assert bench.used == 0, "never announced: free at once after the step"


async def test_cancel_reports_only_after_the_running_step(bench: Bench) -> None:
    bench.lm.gate.clear()
    ticket = await bench.worker.submit(prefill_job(range(20, 30)))
    await until_event(ticket, Admitted)
    await in_step(ticket)
    assert [(name, what) for name, _, what in bench.worker.waits()] == [("r", "the running step")]
    bench.worker.cancel(ticket)
    waiting = asyncio.create_task(until_event(ticket, ReadsTerminal))
    await a_moment(0.1)
    assert not waiting.done()
    bench.lm.gate.set()
    assert (await waiting)[-1] == ReadsTerminal(True)
    bench.worker.half_close(ticket)
    assert await ticket.events.take() == []
    bench.worker.close(ticket, clean=True)


async def test_lost_blocks_wait_out_the_quarantine(bench: Bench) -> None:
    ticket = await bench.worker.submit(prefill_job(range(20, 30)))
    await until_event(ticket, FirstToken)
    bench.worker.close(ticket, clean=False)
    bench.worker.tick()
    assert bench.used == 3
    bench.memory.now += 1.1
    bench.worker.tick()
    assert bench.used == 0


@pytest.mark.parametrize("overlap", [True, False])
async def test_without_overlap_nothing_runs_before_the_image_and_blocks_come_at_the_end(
    overlap: bool,
) -> None:
    bench = Bench(prefill__overlap=overlap, prefill__chunk_tokens=4)
    ids = [20, 21, 22, 23, IMAGE, IMAGE, IMAGE, *range(30, 40)]
    ticket = await bench.worker.submit(prefill_job(ids, items=(image(),)))
    await until_event(ticket, Admitted)
    await until(lambda: len(bench.lm.batches) == overlap)
    await a_moment()
    assert bench.lm.batches == ([ids[:4]] if overlap else [])
    rows = touched(4096)
    bench.worker.embedding_ready(ticket, 0, announced(bench, rows))
    events = await until_event(ticket, FirstToken)
    assert [bench.lm.batches[n] for n in range(5)] == [ids[n : n + 4] for n in range(0, 17, 4)]
    blocks = [len(event.handle.spans) for event in events if isinstance(event, KvReady)]
    assert blocks == ([1] * 5 if overlap else [5])
    bench.worker.close(ticket, clean=True)
    await bench.close()


async def test_without_decode_nothing_is_announced_or_kept(bench: Bench) -> None:
    ticket = await bench.worker.submit(prefill_job([20, 21], max_tokens=1, follows=False))
    events = await until_event(ticket, FirstToken)
    assert [type(e) for e in events] == [Admitted, FirstToken]
    assert events[-1].finish is FinishReason.LENGTH
    assert bench.used == 0
    bench.worker.close(ticket, clean=True)


async def test_a_request_waits_until_all_its_memory_is_free(bench: Bench) -> None:
    """16 blocks: the first takes 10, the second needs 8, the third 1."""
    first = await bench.worker.submit(prefill_job([20] * 40))
    await until_event(first, FirstToken)
    second = await bench.worker.submit(prefill_job([21] * 32))
    third = await bench.worker.submit(prefill_job([20]))
    await a_moment()
    assert not second.admitted
    assert not third.admitted, "nobody overtakes"
    bench.worker.close(first, clean=True)
    await until_event(second, FirstToken)
    await until_event(third, FirstToken)
    bench.worker.close(second, clean=True)
    bench.worker.close(third, clean=True)


async def test_what_waits_is_handed_back_as_not_started(bench: Bench) -> None:
    """And what was admitted is not."""
    running = await bench.worker.submit(prefill_job([20] * 40))
    waiting = await bench.worker.submit(prefill_job([21] * 32))
    bench.worker.hand_back()
    with pytest.raises(EpdError) as caught:
        await until_event(waiting, FirstToken)
    assert caught.value.kind is ErrorKind.NOT_STARTED
    bench.worker.close(waiting, clean=False)
    await until_event(running, FirstToken)
    bench.worker.close(running, clean=True)


async def test_the_last_of_a_flood_gives_its_place_to_another_client() -> None:
    bench = Bench(prefill__max_queue=2)
    first = await bench.worker.submit(prefill_job([20] * 40, salt=b"flood"))
    flood = [await bench.worker.submit(prefill_job([21] * 32, salt=b"flood")) for _ in range(2)]
    with pytest.raises(EpdError):
        await bench.worker.submit(prefill_job([21] * 32, salt=b"flood"))
    other = await bench.worker.submit(prefill_job([22], salt=b"other"))
    with pytest.raises(EpdError) as caught:
        await until_event(flood[1], FirstToken)
    assert caught.value.kind is ErrorKind.OVERLOADED
    assert caught.value.retry_after_s
    bench.worker.close(first, clean=True)
    for ticket in (flood[0], other):
        await until_event(ticket, FirstToken)
        bench.worker.close(ticket, clean=True)
    bench.worker.close(flood[1], clean=False)
    await bench.close()


async def test_an_image_is_read_verified_and_its_place_given_back(bench: Bench) -> None:
    ids = [20, IMAGE, IMAGE, IMAGE, 21]
    ticket = await bench.worker.submit(prefill_job(ids, items=(image(),)))
    first = (await until_event(ticket, Admitted))[0]
    assert first.missing_items == (0,)
    await until(lambda: bench.lm.batches)
    await a_moment()
    assert bench.lm.batches == [[20]], "the text before the image runs, no more"
    rows = touched(4096)
    rows[:48] = 7
    bench.worker.embedding_ready(ticket, 0, announced(bench, rows))
    with pytest.raises(EpdError, match="not missing"):
        bench.worker.embedding_ready(ticket, 0, announced(bench, rows))
    events = await until_event(ticket, FirstToken)
    assert next(e for e in events if isinstance(e, EmbeddingFetched)).transfer_bytes == 48
    assert bench.worker.state()["arena_bytes_used"] == 0, "free once all rows are computed"
    bench.worker.close(ticket, clean=True)


async def test_a_place_that_a_read_may_write_into_is_not_given_back(bench: Bench) -> None:
    ids = [20, IMAGE, IMAGE, IMAGE, 21]
    ticket = await bench.worker.submit(prefill_job(ids, items=(image(),)))
    await until_event(ticket, Admitted)
    rows = touched(4096)
    bench.memory.engine.gate.clear()
    bench.worker.embedding_ready(ticket, 0, announced(bench, rows))
    await until(lambda: bench.memory.engine.readers)
    bench.worker.close(ticket, clean=True)
    await until(lambda: bench.used == 0)
    await a_moment()
    assert bench.worker.state()["arena_bytes_used"] == 64
    bench.memory.engine.gate.set()
    await until(lambda: bench.worker.state()["arena_bytes_used"] == 0)


async def test_half_closing_without_the_images_is_an_error_and_after_them_a_release(
    bench: Bench,
) -> None:
    ids = [20, IMAGE, IMAGE, IMAGE, 21]
    ticket = await bench.worker.submit(prefill_job(ids, items=(image(),)))
    await until_event(ticket, Admitted)
    with pytest.raises(EpdError, match="half-closed"):
        bench.worker.half_close(ticket)
    bench.worker.close(ticket, clean=True)
    text = await bench.worker.submit(prefill_job([20]))
    bench.worker.half_close(text)  # early: nothing is missing, so it runs to its end
    await until_event(text, FirstToken)
    assert await text.events.take() == []
    bench.worker.close(text, clean=True)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"ids": [20] * 65}, ErrorKind.CONTEXT_LENGTH_EXCEEDED),
        ({"ids": [20], "max_tokens": 0}, ErrorKind.INVALID_REQUEST),
        ({"ids": [IMAGE] * 3, "items": (image(1 << 20),)}, ErrorKind.IMAGE_TOO_LARGE),
    ],
)
async def test_what_can_never_run_is_refused(
    bench: Bench, change: dict[str, Any], kind: ErrorKind
) -> None:
    with pytest.raises(EpdError) as caught:
        await bench.worker.submit(prefill_job(**change))
    assert caught.value.kind is kind


async def test_what_waits_for_a_lost_readers_blocks_gets_them_by_the_clock_alone() -> None:
    """Nothing else happens at this worker: no other request comes, none ends."""
    bench = Bench(prefill__prefix_cache=False)
    lost = await bench.worker.submit(prefill_job([20] * 60))
    await until_event(lost, FirstToken)
    bench.worker.close(lost, clean=False)
    waiting = await bench.worker.submit(prefill_job([21] * 60))
    await a_moment()
    assert not waiting.admitted
    bench.memory.now += 10
    bench.worker.tick()
    assert (await until_event(waiting, FirstToken))[-1].token.id == 22
    bench.worker.close(waiting, clean=True)
    await bench.close()
