"""Objects that must be gone as soon as nothing needs them, not when Python next looks for
circles of objects: in a process that lives for long, that is seldom."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def uncollected(*kinds: type) -> Iterator[Callable[[], Counter[str]]]:
    """No circle is found in here. Yields what counts those of `kinds` that are alive and were
    not before."""
    gc.collect()
    before = _alive(kinds)
    gc.disable()
    try:
        yield lambda: _alive(kinds) - before
    finally:
        gc.enable()


def _alive(kinds: tuple[type, ...]) -> Counter[str]:
    return Counter(type(one).__name__ for one in gc.get_objects() if type(one) in kinds)
