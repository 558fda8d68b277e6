"""The engine loop of a stage: one forward at a time, off the event loop.

`step` runs on the event loop: it asks the pure scheduler what to run, hands the
tensor work to the one engine thread with `run`, and applies the result. So
scheduler state is touched by the loop only, tensors by the thread only.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from epd.obs import metrics
from epd.runtime.core_turns import CoreTurns
from epd.transfer.faults import from_environment

Result = TypeVar("Result")


class EngineThread:
    """The one thread that does tensor work in a process, whatever stages it hosts.

    Steps of several loops run first come, first served, and a loop has one step in it at
    most: stages that have work take turns. What one frees (blocks, say) another may wait
    for, so a poke wakes all loops. With `turns` the thread also waits for other processes'
    steps.
    """

    def __init__(self, name: str, turns: CoreTurns | None = None) -> None:
        self.executor = ThreadPoolExecutor(
            1, thread_name_prefix=f"{name}-engine", initializer=_use_threads
        )
        self.advanced = time.monotonic()
        """When a part of a step was done last."""
        self._loops: list[StepLoop] = []
        self._waiting: set[object] = set()
        self._turns = turns

    @property
    def wanted(self) -> bool:
        """Whether another step waits for the running one's end. Called in the thread."""
        return bool(self._waiting) or (self._turns is not None and self._turns.wanted)

    @property
    def contended(self) -> bool:
        """Whether another process waited for the last step's end, or this one for its."""
        return self._turns is not None and self._turns.contended

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run something behind all that waits already; raises what it raises."""
        turn = object()

        def begun() -> Result:
            self._waiting.discard(turn)
            with self._turn():
                return work()

        self._waiting.add(turn)
        try:
            return await asyncio.get_running_loop().run_in_executor(self.executor, begun)
        finally:
            self._waiting.discard(turn)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if self._turns is None:
            yield
            return
        try:
            self._turns.take(self.advance)  # waiting for another process is no stall of this one
            self.advance()
            yield
        finally:
            self._turns.give()

    def shut_down(self) -> None:
        """Wait for the running step; after it none runs, nor does one that waits for another
        process's. May be called again."""
        if self._turns is not None:
            self._turns.stop()
        self.executor.shutdown(True)
        if self._turns is not None:
            self._turns.close()

    def join(self, loop: StepLoop) -> None:
        """Its steps run here from now on."""
        self._loops.append(loop)

    def leave(self, loop: StepLoop) -> None:
        """It makes no more steps: nothing here keeps it, or what it works on, alive."""
        if loop in self._loops:
            self._loops.remove(loop)

    def busy(self, stage: str) -> bool:
        """Whether a stage has work here that a step could do now."""
        return any(loop.busy_now for loop in self._loops if loop.stage == stage)

    def poke(self) -> None:
        for loop in self._loops:
            loop.wake.set()

    def advance(self) -> None:
        """A part of the running step is done (a layer): however long the whole takes, it
        makes progress. Called in the thread."""
        self.advanced = time.monotonic()


def _use_threads() -> None:
    """In a new thread OpenMP has the number of threads that it was loaded with, in a fork that
    of its fork server, until torch is asked for its own."""
    if torch := sys.modules.get("torch"):
        torch.get_num_threads()


class StepLoop:
    """Calls `step` as long as it did something, then sleeps until `poke`.

    `runnable` says whether there is work that a step could do now: with work and
    without a step, or a part of one, for too long, the stage is stalled.
    """

    def __init__(
        self,
        stage: str,
        step: Callable[[], Awaitable[bool]],
        runnable: Callable[[], bool],
        thread: EngineThread | None = None,
    ) -> None:
        self.stage = stage
        self._step = step
        self._runnable = runnable
        self._thread = thread or EngineThread(stage)
        self.wake = asyncio.Event()
        self._thread.join(self)
        self._faults = from_environment()
        self._task: asyncio.Task[None] | None = None
        self._last_progress = time.monotonic()
        self.in_step = False
        self.steps = 0
        self.last_ms = 0.0
        """Of the last step, in the thread: without the wait for other stages' steps."""

    def start(self) -> asyncio.Task[None]:
        """The task ends only by `close`, or by a bug of ours, which it raises."""
        self._task = asyncio.create_task(self._forever(), name=f"{self.stage} steps")
        return self._task

    def poke(self) -> None:
        """Something changed: there may be work."""
        self._thread.poke()

    @property
    def busy_now(self) -> bool:
        """A step is under way, or there is work for one."""
        return self.in_step or self._runnable()

    def busy(self, stage: str) -> bool:
        """The same of a stage in this process; false of one that is elsewhere."""
        return self._thread.busy(stage)

    @property
    def advance(self) -> Callable[[], None]:
        """What the tensor work calls after each part of a step."""
        return self._thread.advance

    async def run(self, work: Callable[[], Result], size: int) -> Result:
        """Run one forward in the engine thread. `size` is for the metrics only.

        Raises:
            What `work` raises; it is counted as a failed step.
        """
        try:
            return await self.in_thread(lambda: self.timed(work))
        finally:
            self.count(size, self.last_ms)

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """Run in the engine thread what makes steps, each of them `timed` and counted.

        Raises:
            What `work` raises; it is counted as a failed step.
        """
        self.in_step = True
        try:
            return await self._thread.run(work)
        except Exception:
            metrics.STEP_FAILURES.labels(self.stage).inc()
            raise
        finally:
            self.in_step = False

    def timed(self, work: Callable[[], Result]) -> Result:
        """Run one forward, in the engine thread."""
        start = time.monotonic()
        try:
            if hang := self._faults.value("step.hang"):
                time.sleep(hang)
            return work()
        finally:
            self.last_ms = (time.monotonic() - start) * 1e3

    @property
    def wanted(self) -> bool:
        """Whether another step waits for the running one's end. Called in the thread."""
        return self._thread.wanted

    @property
    def contended(self) -> bool:
        """Whether another process waited for the last step's end, or this one for its."""
        return self._thread.contended

    def count(self, size: int, ms: float) -> None:
        """A step of so many sequences is over."""
        self.steps += 1
        self._last_progress = time.monotonic()
        metrics.STEPS.labels(self.stage).inc()
        metrics.STEP_SECONDS.labels(self.stage).observe(ms / 1e3)
        metrics.STEP_SIZE.labels(self.stage).observe(size)

    def stalled_for(self) -> float:
        """Seconds since the last progress while there is work; 0 without work."""
        if not self.busy_now:
            self._last_progress = time.monotonic()
        # One thread: another stage's layers are what a step in the queue waits for.
        last = max(self._last_progress, self._thread.advanced if self.in_step else 0.0)
        return time.monotonic() - last

    async def close(self) -> None:
        """Stop after the running step."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.to_thread(self._thread.shut_down)
        self._thread.leave(self)

    async def _forever(self) -> None:
        while True:
            await self.wake.wait()
            self.wake.clear()
            while await self._step():
                await asyncio.sleep(0)  # streams get their turn between steps
