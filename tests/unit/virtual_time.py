"""An event loop whose clock jumps to the next timer: hours pass in no time, and every
measured time is exact."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_BASE: Any = asyncio.SelectorEventLoop


class VirtualLoop(asyncio.SelectorEventLoop):
    """For coroutines that do no real I/O."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 1000.0  # not 0: a time that was never set must not look right

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        loop: Any = self  # its inside has no types
        waiting = [timer.when() for timer in loop._scheduled if not timer.cancelled()]
        if not loop._ready and waiting:
            self._now = max(self._now, min(waiting))
        _BASE._run_once(self)


def run(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
