"""A step that nobody waits for may be long; any other keeps to `prefill.step_ms`."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from epd.kv.pool import KvPool
from epd.models.lm import ForwardBatch
from prefill.ticket import FirstToken
from tests.unit.fake_stage import FakeLm, prefill_job
from tests.unit.prefill_bench import Bench, until_event
from tests.unit.test_colocated_workers import CheckedLm, Run, Together
from tests.waiting import LIMIT_S, until

MODEST: dict[str, Any] = {
    "prefill__step_ms": 1,
    "prefill__lone_step_ms": 1e6,
    "prefill__prefix_cache": False,
    "kv__prefill_tokens": 256,
}
SHORT = 16
"""Tokens of a step that should take 1 ms, at 1 ms a token."""


class Slow:
    """At least a millisecond a token."""

    def forward(self, batch: ForwardBatch, pool: KvPool) -> torch.Tensor:
        time.sleep(1e-3 * len(batch.token_ids))
        return super().forward(batch, pool)  # type: ignore[misc]


class SlowLm(Slow, FakeLm):
    pass


class SlowCheckedLm(Slow, CheckedLm):
    pass


async def test_a_lone_request_runs_in_one_step_and_two_in_short_ones() -> None:
    bench = Bench(SlowLm(), **MODEST)
    first = await bench.worker.submit(prefill_job(range(20, 40)))  # shows what a token costs
    await until_event(first, FirstToken)
    bench.worker.close(first, clean=True)
    lone = await bench.worker.submit(prefill_job(range(20, 80)))
    await until_event(lone, FirstToken)
    assert [len(batch) for batch in bench.lm.batches] == [20, 60]
    bench.worker.close(lone, clean=True)
    bench.lm.gate.clear()
    tickets = [await bench.worker.submit(prefill_job(range(20, 80))) for _ in range(3)]
    await until(lambda: all(ticket.admitted for ticket in tickets))
    bench.lm.batches.clear()
    bench.lm.gate.set()
    for ticket in tickets:
        await until_event(ticket, FirstToken)
        bench.worker.close(ticket, clean=True)
    sizes = [len(batch) for batch in bench.lm.batches]
    assert sizes[0] == 60, "it was alone when it began"
    assert max(sizes[1:6]) <= SHORT, "two are left"
    await bench.close()


async def test_answers_that_run_in_the_process_keep_prefills_steps_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.unit.test_colocated_workers.CheckedLm", SlowCheckedLm)
    both = Together(**MODEST)
    await asyncio.wait_for(Run(both, range(20, 40), max_tokens=1).go(), LIMIT_S)
    answer = asyncio.create_task(Run(both, range(20, 24), max_tokens=50).go())
    await until(lambda: both.decode.steps.steps > 0)
    both.lm.gate.clear()
    ticket = await both.prefill.submit(replace(prefill_job(range(20, 50)), nonce=9))
    assert not answer.done()
    both.lm.batches.clear()
    both.lm.gate.set()
    await until_event(ticket, FirstToken)
    chunks = [len(batch) for batch in both.lm.batches if len(batch) > 1]
    assert chunks == [SHORT, 30 - SHORT]
    both.prefill.close(ticket, clean=True)
    await asyncio.wait_for(answer, LIMIT_S)
    await both.close()
