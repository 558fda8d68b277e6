"""Resident memory of a service's processes, their helpers included, and how it grows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.e2e.cluster import Cluster


def resident(pids: Iterable[int]) -> int:
    """Bytes of these processes and of all their children (sandboxes, prompt processes).

    Proportional: helpers are forks, and a page that they share with what they are forked
    from counts once, however many of them touch it. Pages of files don't count: how many
    processes of the machine share torch's libraries at the moment is nobody's growth.
    """
    total = 0
    for pid in pids:
        owner = psutil.Process(pid)
        for process in (owner, *owner.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):  # a helper that was just replaced
                total += _own(process.pid)
    return total


def _own(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise psutil.NoSuchProcess(pid) from error
    found = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines[1:])}
    return sum(int(found[name][0]) << 10 for name in ("Pss_Anon", "Pss_Shmem"))


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
