"""Steps one after another in the engine thread: what is offered, what ends them, who is told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest

from epd.runtime.series import Series
from epd.runtime.steps import EngineThread, StepLoop
from tests.waiting import LIMIT_S, until


async def _no_step() -> bool:
    return False


class Bench:
    """Steps that wait for a gate each, on numbers."""

    def __init__(self) -> None:
        thread = EngineThread("both")
        self.loop, self.other = (
            StepLoop(name, _no_step, lambda: False, thread) for name in ("decode", "prefill")
        )
        self.series = Series(self.loop, self._run, self._done)
        self.gates = {number: threading.Event() for number in range(9)}
        self.began: list[int] = []
        self.given: list[tuple[int, int]] = []
        """(result, steps that had begun by then)."""
        self.kernels = True

    def _run(self, work: Sequence[int], begin: Callable[[], None]) -> Sequence[int]:
        (number,) = work
        if number < 0:
            raise ZeroDivisionError
        self.began.append(number)
        if self.kernels:
            begin()
        assert self.gates[number].wait(LIMIT_S)
        return work

    def _done(self, results: Sequence[int], ms: float) -> None:
        assert ms >= 0
        self.given.append((results[0], len(self.began)))

    async def close(self) -> None:
        for loop in (self.loop, self.other):
            await loop.close()


async def test_what_is_offered_follows_and_a_result_is_given_when_the_next_begins() -> None:
    bench = Bench()
    running = asyncio.create_task(bench.series.run([1]))
    await until(lambda: bench.began == [1])
    bench.series.offer([2])
    assert bench.given == []
    bench.gates[1].set()
    await until(lambda: bench.given == [(1, 2)])
    assert not bench.series.withdraw(), "it runs"
    bench.gates[2].set()
    await running
    assert bench.given == [(1, 2), (2, 2)]
    assert bench.loop.steps == 2
    await bench.close()


async def test_a_result_is_not_kept_back_by_a_step_without_kernels() -> None:
    bench = Bench()
    bench.kernels = False
    running = asyncio.create_task(bench.series.run([1]))
    await until(lambda: bench.began == [1])
    bench.series.offer([2])
    bench.gates[1].set()
    bench.gates[2].set()
    await running
    assert [result for result, _ in bench.given] == [1, 2]
    await bench.close()


async def test_what_is_withdrawn_does_not_run() -> None:
    bench = Bench()
    running = asyncio.create_task(bench.series.run([1]))
    await until(lambda: bench.began == [1])
    bench.series.offer([2])
    assert bench.series.withdraw()
    assert not bench.series.withdraw()
    bench.series.offer([3])
    bench.gates[1].set()
    bench.gates[3].set()
    await running
    assert bench.began == [1, 3]
    await bench.close()


async def test_another_stage_that_waits_for_the_thread_has_its_turn() -> None:
    bench = Bench()
    running = asyncio.create_task(bench.series.run([1]))
    await until(lambda: bench.began == [1])
    waiting = asyncio.create_task(bench.other.run(lambda: list(bench.began), 1))
    await until(lambda: bench.loop.wanted)
    bench.series.offer([2])
    bench.gates[1].set()
    assert await waiting == [1]
    await running
    assert bench.series.withdraw(), "it was not begun"
    assert not bench.loop.wanted
    await bench.close()


async def test_what_a_step_raises_ends_the_series_after_the_results_before_it() -> None:
    bench = Bench()
    running = asyncio.create_task(bench.series.run([1]))
    await until(lambda: bench.began == [1])
    bench.series.offer([-1])
    bench.gates[1].set()
    with pytest.raises(ZeroDivisionError):
        await running
    assert [result for result, _ in bench.given] == [1]
    await bench.close()


async def test_who_gives_up_waiting_leaves_the_running_step_alone() -> None:
    bench = Bench()
    running = asyncio.create_task(bench.series.run([1]))
    await until(lambda: bench.began == [1])
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not bench.loop.in_step
    bench.gates[1].set()
    await bench.close()
    assert bench.given == []
