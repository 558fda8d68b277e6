"""Waiting for what a test needs, never for a time that a slow or crowded machine exceeds.

Three words for the three things that a test may want of the clock:

    until       something comes true; how soon is not the question
    a_moment    something must *not* happen: on a slow machine the look is weaker, never wrong
    soon        it ends, and doesn't wait for something else that ends much later
    promised    a time that the documentation promises, on a machine with cores for all
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LIMIT_S = 60.0
"""Far above what anything here takes: only a failure ever waits so long."""


def _never(condition: Callable[[], object], limit_s: float) -> AssertionError:
    try:
        what = inspect.getsource(condition).strip()
    except (OSError, TypeError):
        what = repr(condition)
    return AssertionError(f"not within {limit_s:g} s: {what}")


async def until(condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """Return as soon as `condition` holds; it is looked at between other tasks' work."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise _never(condition, limit_s)
        await asyncio.sleep(0.002)


def block_until(condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """`until` for tests without an event loop."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise _never(condition, limit_s)
        time.sleep(0.01)


async def a_moment(seconds: float = 0.05) -> None:
    """Time for what must not happen; only negatives may be asserted after it."""
    await asyncio.sleep(seconds)


def promised(seconds: float) -> float:
    """What a time that we promise is on this machine now: as much more as it has fewer cores
    than processes that want one, at this moment or in the last minute.

    That hides a broken promise where others want the cores as well. Where a wait may be the
    wrong one, make that wait far longer than the promise (`ONLY_STREAMS` of the dead stages);
    and `EPD_PROMISES=plain`, on a quiet machine, takes all times as they are promised."""
    if os.environ.get("EPD_PROMISES") == "plain":
        return seconds
    wanting = max(os.getloadavg()[0], _running())
    return seconds * min(max(1.0, wanting / (os.cpu_count() or 1)), 10.0)


def _running() -> int:
    """Threads of this machine that have a core or want one; the average lags behind them."""
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])


@contextmanager
def soon(limit_s: float, instead_of: str) -> Iterator[None]:
    """The block takes less than `limit_s`; `instead_of` says what it would wait for if the
    promise were broken. The limit belongs well above the promised time and below that."""
    started = time.monotonic()
    yield
    took = time.monotonic() - started
    assert took < limit_s, f"{took:.2f} s: waited for {instead_of}"
