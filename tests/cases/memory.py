"""Resident memory of a service's processes, their helpers included, and how it grows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

import psutil

from tests.e2e.cluster import Cluster


def resident(pids: Iterable[int]) -> int:
    """Bytes of these processes and of all their children (sandboxes, prompt processes).

    Proportional: helpers are forks, and a page that they share with what they are forked
    from counts once, however many of them touch it.
    """
    total = 0
    for pid in pids:
        owner = psutil.Process(pid)
        for process in (owner, *owner.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):  # a helper that was just replaced
                total += process.memory_full_info().pss
    return total


@contextmanager
def peak_growth(cluster: Cluster) -> Iterator[Callable[[], int]]:
    """Yields a function that gives the most bytes by which gateway and encoder, which parse
    what clients send, have grown since."""
    pids = [cluster.worker(role).pid for role in ("gateway", "encode")]
    start, peak, done = resident(pids), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            peak[0] = max(peak[0], resident(pids) - start)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: peak[0]
    finally:
        done.set()
        thread.join()
