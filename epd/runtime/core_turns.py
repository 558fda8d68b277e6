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
process that dies. Locks alone say whose turn it is. What is written in the file says less:

    bytes 0 to 7    number of the latest turn, by whoever has it
    bytes 8 to 11   a bell, rung by whoever has left a place: those who wait sleep until then

A kernel that frees a dead process's places rings no bell, so nobody sleeps for longer than
`look_s`. A process that is stopped, or computes for too long, holds nobody up for longer than
`longest_s`: who has seen one turn for so long, or nobody take the next, computes beside it,
without another wait until somebody's next turn begins. A queue in which turns follow each other
may take as long as it takes.
"""

from __future__ import annotations

import fcntl
import os
import struct
import sys
import time
from collections.abc import Callable
from typing import Final

from epd.errors import EpdError, ErrorKind, invalid
from epd.obs import metrics
from epd.runtime.bell import Bell

_PLACES: Final = 8
"""More processes than that are let in at the end of the queue in no order."""
_OUTSIDE: Final = _PLACES
_NUMBER_BYTES: Final = 8
_BELL_AT: Final = 8
_FILE_BYTES: Final = 12
LOOK_S: Final = 0.05
LONGEST_S: Final = 5.0
_FLOCK: Final = "hhqqi"
"""struct flock of 64-bit Linux: type, whence, start, length, process."""


def open_file(path: str) -> int:
    """A descriptor of the queue's file, which is made if there is none.

    Closing it, or any other of that file, ends all locks that the process has in it.

    Raises:
        EpdError: INVALID_REQUEST, it can't be made, opened or written.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _refused(path, error) from error
    try:
        os.posix_fallocate(file, 0, _FILE_BYTES)  # changes nothing that is there
    except OSError as error:
        os.close(file)
        raise _refused(path, error) from error
    return file


class CoreTurns:
    """The place of one process in the queue. One thread at a time (the engine thread), but
    for `wanted` and `stop`.

    Locks are the process's own: a second object for the same file in one process would not
    wait for the first, and a forked child holds none.
    """

    def __init__(
        self, path: str, name: str, longest_s: float = LONGEST_S, look_s: float = LOOK_S
    ) -> None:
        """Raises EpdError: INVALID_REQUEST, the file can't be made, opened or mapped."""
        self._file = open_file(path)
        try:
            self._bell = Bell(self._file, _BELL_AT)
        except (OSError, ValueError) as error:
            os.close(self._file)
            raise _refused(path, error) from error
        self._longest_s, self._look_s = longest_s, look_s
        self._place = _OUTSIDE
        self._left = False
        """Whether it has left a place since it rang last."""
        self._stopping = False
        self._beside: int | None = None
        """The turn, of somebody else, that this process has waited for in vain."""
        self._waited = metrics.TURN_WAIT_SECONDS.labels(name)
        self._overrun = metrics.TURN_OVERRUNS.labels(name)
        self.contended = False
        """Whether another process computed, or waited, when the last turn came or ended."""

    def take(self, waits: Callable[[], None] = lambda: None) -> None:
        """Wait for this process's turn, while others' turns follow each other. `waits` is called
        meanwhile, again and again.

        Raises:
            EpdError: STAGE_UNAVAILABLE, `stop` was called.
            OSError: the file can't be written. The turn is to be given back.
        """
        since = time.monotonic()
        self.contended = False
        watch = _Watch(self._latest(), since)
        if watch.turn != self._beside:
            self._beside = None  # a damaged file may come by that number again
        try:
            while self._place:
                if self._stopping:
                    raise _stopped()
                if not self._pass_all() and not self._move_up(watch, waits):
                    break
        finally:
            self._waited.inc(time.monotonic() - since)
        if self._place:
            self._overrun.inc()
            self._leave()
            self._beside = watch.turn
        else:
            self._count()
        self._ring()

    def give(self) -> None:
        """The turn is over."""
        self.contended = self.contended or self.wanted
        self._leave()
        self._ring()

    def stop(self) -> None:
        """No more turns: a `take` that waits, and each one later, raises. Of any thread."""
        self._stopping = True
        if self._file >= 0:
            self._bell.ring()

    @property
    def wanted(self) -> bool:
        """Whether another process waits for its turn. Of the thread that has it."""
        return self._taken(1)

    def close(self) -> None:
        """After the last turn; the file stays. May be called again."""
        if self._file >= 0:
            self._bell.close()
            os.close(self._file)
        self._file = -1

    def _latest(self) -> int:
        """Which turn began last, whoever's."""
        return int.from_bytes(os.pread(self._file, _NUMBER_BYTES, 0), sys.byteorder)

    def _count(self) -> None:
        """This turn is the latest. Nobody else writes that: it is who has place 0 that may."""
        number = (self._latest() + 1) % 2 ** (8 * _NUMBER_BYTES)
        os.pwrite(self._file, number.to_bytes(_NUMBER_BYTES, sys.byteorder), 0)

    def _pass_all(self) -> bool:
        """At once, where nobody else stands anywhere."""
        if self._place != _OUTSIDE or not self._lock(0, _PLACES):
            return False
        self._place = 0
        self._unlock(1, _PLACES - 1)
        return True

    def _move_up(self, watch: _Watch, waits: Callable[[], None]) -> bool:
        """One place, or a sleep until that may be; False if one turn has taken too long."""
        following = self._place - 1
        if not self._lock(following):
            self.contended = True
            self._ring()  # who came meanwhile may wait for a place that this one has passed
            state = self._bell.state()
            if self._stopping:
                return True
            if not self._lock(following):
                left_s = self._left_s(watch)
                if left_s <= 0:
                    return False
                waits()
                self._bell.hear(state, min(left_s, self._look_s))
                return True
        self._leave()
        self._place = following
        return True

    def _left_s(self, watch: _Watch) -> float:
        """How much longer the latest turn is waited for."""
        turn = self._latest()
        return 0.0 if turn == self._beside else self._longest_s - watch.age_s(turn)

    def _leave(self) -> None:
        if self._place != _OUTSIDE:
            self._unlock(self._place)
        self._place = _OUTSIDE

    def _ring(self) -> None:
        if self._left:
            self._bell.ring()
        self._left = False

    def _lock(self, place: int, count: int = 1) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, count, place)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _unlock(self, place: int, count: int = 1) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, count, place)
        self._left = True

    def _taken(self, place: int) -> bool:
        """Whether another process stands there; nobody is held up by the look."""
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
        found = fcntl.fcntl(self._file, fcntl.F_GETLK, asked)
        return bool(struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK)


class _Watch:
    """Since when one turn has been the latest, as far as was seen."""

    def __init__(self, turn: int, now: float) -> None:
        self.turn, self._since = turn, now

    def age_s(self, turn: int) -> float:
        """Of the latest one."""
        now = time.monotonic()
        if turn != self.turn:
            self.turn, self._since = turn, now
        return now - self._since


def _stopped() -> EpdError:
    return EpdError(ErrorKind.STAGE_UNAVAILABLE, "the worker stops", retry_after_s=1.0)


def _refused(path: str, error: OSError | ValueError) -> EpdError:
    why = error.strerror if isinstance(error, OSError) else error
    return invalid(f"worker.turns_file: {path}: {why}", "worker.turns_file")
