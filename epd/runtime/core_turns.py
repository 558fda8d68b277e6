"""Processes of one host that share its cores take turns: one forward at a time.

Three processes with as many threads as there are cores each hold up the others at every
barrier of every layer; with one thread each, cores idle while one stage has work for all of
them, and decode, which has a core whatever the others do, takes steps of few sequences, each
of which reads all weights. In turns each forward has all cores, and sequences come together
while the others compute, as in one process (docs/adr/0009-turns-between-processes.md).

The queue is a file of bytes, each locked by whoever stands there:

    newcomers -> 7 -> 6 -> ... -> 1 -> 0 (computes)

Who stands at a place takes the next one before it leaves its own, so nobody overtakes: first
come, first served, also for a process that has just computed. The kernel takes the locks of a
process that dies. One that is stopped, or computes for too long, holds nobody up for longer
than `longest_s`: who has waited for so long computes beside it, without another wait until
somebody's next turn begins. The file's time of change tells one turn from the next.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from typing import Final

from epd.errors import invalid
from epd.obs import metrics

_PLACES: Final = 8
"""More processes than that are let in at the end of the queue in no order."""
_OUTSIDE: Final = _PLACES
_POLL_S: Final = 0.0005
"""The kernel can wait for a lock, but not for a while only."""
LONGEST_S: Final = 5.0


def open_file(path: str) -> int:
    """A descriptor of the queue's file, which is made if there is none.

    Closing it, or any other of that file, ends all locks that the process has in it.

    Raises:
        EpdError: INVALID_REQUEST, it can't be made or opened.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        why = f"worker.turns_file: {path}: {error.strerror}"
        raise invalid(why, "worker.turns_file") from error


class CoreTurns:
    """The place of one process in the queue. One thread at a time (the engine thread), but
    for `wanted`.

    Locks are the process's own: a second object for the same file in one process would not
    wait for the first, and a forked child holds none.
    """

    def __init__(self, path: str, name: str, longest_s: float = LONGEST_S) -> None:
        """Raises EpdError: INVALID_REQUEST, the file can't be made or opened."""
        self._file = open_file(path)
        self._longest_s = longest_s
        self._place = _OUTSIDE
        self._beside: int | None = None
        """The turn, of somebody else, that this process has waited for in vain."""
        self._waited = metrics.TURN_WAIT_SECONDS.labels(name)
        self._overrun = metrics.TURN_OVERRUNS.labels(name)
        self.contended = False
        """Whether another process computed, or waited, when the last turn came or ended."""

    def take(self, waits: Callable[[], None] = lambda: None) -> None:
        """Wait for this process's turn, `longest_s` at most. `waits` is called meanwhile, again
        and again."""
        since = time.monotonic()
        until = since if self._latest() == self._beside else since + self._longest_s
        self.contended = False
        while self._place and self._move_up(until, waits):
            pass
        self._waited.inc(time.monotonic() - since)
        if self._place:
            self._overrun.inc()
            self._leave()
            self._beside = self._latest()
        else:
            os.utime(self._file)

    def give(self) -> None:
        """The turn is over."""
        self.contended = self.contended or self.wanted
        self._leave()

    @property
    def wanted(self) -> bool:
        """Whether another process waits for its turn. Of the thread that has it."""
        if not self._lock(1):
            return True
        self._unlock(1)
        return False

    def close(self) -> None:
        """After the last turn; the file stays. May be called again."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _latest(self) -> int:
        """Which turn began last, whoever's."""
        return os.fstat(self._file).st_mtime_ns

    def _move_up(self, until: float, waits: Callable[[], None]) -> bool:
        """One place; False if the time is over."""
        following = self._place - 1
        while not self._lock(following):
            self.contended = True
            if time.monotonic() >= until:
                return False
            waits()
            time.sleep(_POLL_S)
        self._leave()
        self._place = following
        return True

    def _leave(self) -> None:
        if self._place != _OUTSIDE:
            self._unlock(self._place)
        self._place = _OUTSIDE

    def _lock(self, place: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _unlock(self, place: int) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, place)
