"""Steps that follow each other in the engine thread, without the event loop in between.

    loop    offer 2 .............. results of 1, offer 3 ........... results of 2
    thread  step 1 [kernels] step 2, give 1 away [kernels] step 3, give 2 away [kernels]

Between two steps of the loop's own making lie two changes of thread and whatever the loop does
first: sending tokens, most of all. Here the thread goes on with what was offered, and gives a
result away only when the next step's kernels begin, which don't need the interpreter: the loop
then has the time of a step for it. Where nothing was offered, or another stage's step waits
for the thread, the series ends and the loop decides.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

from epd.runtime.steps import StepLoop

Work = TypeVar("Work")
Result = TypeVar("Result")

Run = Callable[[Sequence[Work], Callable[[], None]], Sequence[Result]]
"""In the thread: the results of one step; calls the given function when its kernels begin."""
Done = Callable[[Sequence[Result], float], None]
"""On the loop: the results of one step, and its milliseconds."""


class Series(Generic[Work, Result]):
    """One at a time. Methods run on the event loop."""

    def __init__(self, steps: StepLoop, run: Run[Work, Result], done: Done[Result]) -> None:
        self._steps = steps
        self._run = run
        self._done = done
        self._offered: deque[Sequence[Work]] = deque(maxlen=1)

    def offer(self, work: Sequence[Work]) -> None:
        """The next step; the thread takes it when it is done with the running one."""
        assert not self._offered
        self._offered.append(work)

    def withdraw(self) -> bool:
        """Take back what was offered; False if there is nothing, or the thread has it."""
        try:
            self._offered.pop()
        except IndexError:
            return False
        return True

    async def run(self, first: Sequence[Work]) -> None:
        """Make this step and what is offered meanwhile; returns when all results were given
        to `done`. What is offered at the end is not begun.

        Raises:
            What a step or `done` raises.
        """
        loop = asyncio.get_running_loop()
        given: asyncio.Queue[tuple[Sequence[Result], float] | None] = asyncio.Queue()

        def give(result: tuple[Sequence[Result], float] | None) -> None:
            loop.call_soon_threadsafe(given.put_nowait, result)

        def follow() -> None:
            try:
                self._follow(first, give)
            finally:
                give(None)

        running = asyncio.create_task(self._steps.in_thread(follow), name="series of steps")
        try:
            while (result := await given.get()) is not None:
                if result[0]:  # else there was nothing left to do
                    self._steps.count(len(result[0]), result[1])
                self._done(*result)
            await running
        finally:
            running.cancel()

    def _follow(
        self, first: Sequence[Work], give: Callable[[tuple[Sequence[Result], float]], None]
    ) -> None:
        """In the thread."""
        kept: list[tuple[Sequence[Result], float]] = []

        def begin() -> None:
            while kept:
                give(kept.pop())

        work: Sequence[Work] | None = first
        try:
            while work is not None:
                results = self._steps.timed(partial(self._run, work, begin))
                begin()
                kept.append((results, self._steps.last_ms))
                work = None if self._steps.wanted else self._take()
        finally:
            begin()

    def _take(self) -> Sequence[Work] | None:
        try:
            return self._offered.pop()
        except IndexError:
            return None
