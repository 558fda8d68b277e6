"""What autoscalers and alerts go by: the work that waits in a stage, and how late answers are."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client import REGISTRY

from epd.jobs import SampledToken
from gateway.progress import Progress
from gateway.timeline import Timeline
from prefill.budget import StepBudget
from prefill.scheduler import ItemSpan, Scheduler
from prefill.ticket import FirstToken
from tests.unit.decode_bench import Bench as DecodeBench
from tests.unit.fake_stage import prefill_job
from tests.unit.prefill_bench import Bench, in_step, until_event
from tests.waiting import until


def test_tokens_that_wait_are_those_that_only_time_keeps_from_being_computed() -> None:
    scheduler = Scheduler(4, 4, 100)
    assert scheduler.queued_tokens == 0
    scheduler.admit(1, 10)
    assert scheduler.queued_tokens == 10, "it waits for memory"
    scheduler.admit(2, 20, [ItemSpan(0, range(5, 9))])
    scheduler.reserve(lambda key: 0)
    assert scheduler.queued_tokens == 10 + 5, "what is behind a picture waits for its encoder"
    for chunk in scheduler.next_batch():
        scheduler.complete(chunk)
    assert scheduler.queued_tokens == 10 + 5 - 4
    scheduler.item_ready(2, 0)
    assert scheduler.queued_tokens == 10 + 20 - 4
    scheduler.abort(1)
    scheduler.abort(2)
    assert scheduler.queued_tokens == 0


def test_a_cached_prefix_is_no_work() -> None:
    scheduler = Scheduler(4, 4, 100)
    scheduler.admit(1, 10)
    scheduler.reserve(lambda key: 8)
    assert scheduler.queued_tokens == 2


def test_tokens_are_priced_as_measured() -> None:
    budget = StepBudget(512, 250)
    assert budget.ms(1000) == 0.0, "nothing is known yet"
    budget.observe(100, 50.0)
    assert budget.ms(1000) == pytest.approx(500.0)


async def test_prefill_says_how_far_it_is_behind() -> None:
    bench = Bench()
    assert bench.worker.state()["backlog_ms"] == 0.0
    first = await bench.worker.submit(prefill_job(range(20, 40)))
    await until_event(first, FirstToken)
    bench.worker.close(first, clean=True)
    bench.lm.gate.clear()
    running = await bench.worker.submit(prefill_job(range(40, 60)))
    await in_step(running)
    waiting = await bench.worker.submit(prefill_job(range(60, 90)))
    state: Any = bench.worker.state()
    assert state["queued_tokens"] >= 30
    assert state["backlog_ms"] > 0
    bench.lm.gate.set()
    for ticket in (running, waiting):
        await until_event(ticket, FirstToken)
        bench.worker.close(ticket, clean=True)
    await until(lambda: bench.worker.state()["queued_tokens"] == 0)
    assert bench.worker.state()["backlog_ms"] == 0.0
    await bench.close()


async def test_decode_says_how_many_it_may_run() -> None:
    bench = DecodeBench(decode__max_running=7)
    assert bench.worker.state()["max_running"] == 7
    await bench.close()


def counted(end: str) -> float:
    return REGISTRY.get_sample_value(f"epd_token_seconds_{end}", {"stage": "gateway"}) or 0.0


async def test_the_mean_between_tokens_is_measured() -> None:
    now = [100.0]
    progress = Progress(asyncio.Queue(), Timeline(lambda: now[0]))
    before = [counted(end) for end in ("sum", "count")]

    def since() -> list[float]:
        return [counted(end) - old for end, old in zip(("sum", "count"), before, strict=True)]

    now[0] += 1.5
    await progress.extend(0, [SampledToken(1)])
    for index in range(1, 5):
        now[0] += 0.2
        assert progress.offer(index, [SampledToken(index)])
    assert since() == [0, 0]
    now[0] += 30.0  # the teardown is no part of it
    progress.stop()
    assert since() == pytest.approx([0.2, 1])
    await progress.end()
    assert since() == pytest.approx([0.2, 1]), "an output ends once"


async def test_an_answer_of_one_token_has_nothing_between() -> None:
    progress = Progress(asyncio.Queue(), Timeline())
    before = counted("count")
    await progress.extend(0, [SampledToken(1)])
    progress.stop()
    assert counted("count") == before
