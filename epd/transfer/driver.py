"""Drives Mooncake: submits what `flow.py` allows, follows every id to its end.

run() --> Flow --> Submitter (its own thread) --> ids --> poll (event loop) --> done
                                                      |
          failed, timed out, cancelled: parked, owner pinned until the ids end
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Hashable
from itertools import groupby

from epd.transfer import metrics
from epd.transfer.flow import Flow, Read
from epd.transfer.pieces import Piece
from epd.transfer.submitter import Native, Result, Submitter

log = logging.getLogger("epd.transfer")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.002


class ReadFailed(Exception):
    """Mooncake refused or failed a descriptor, or the driver has stopped."""


class Driver:
    """All reads of one engine. Belongs to one event loop, that of its first read.

    `late_s`: when an id is older than this, Mooncake breaks its own timeouts.
    """

    def __init__(self, native: Native, late_s: float) -> None:
        self._native = native
        self._late_s = late_s
        self._flow = Flow()
        self._submitter = Submitter(native, self._deliver)
        self._waiters: dict[Read, asyncio.Future[None]] = {}
        self._on_settled: list[tuple[Hashable, Callable[[], None]]] = []
        self._submitted_at: dict[int, float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._poller: asyncio.Task[None] | None = None
        self._stopping = False

    async def run(self, name: str, parts: list[Piece], owner: object, key: Hashable) -> None:
        """Move all parts, or raise; then the read may go on, parked (see Engine.read).

        Raises:
            ReadFailed: with what Mooncake said.
        """
        if self._stopping:
            raise ReadFailed("this worker's transfer engine is closed")
        if not parts:
            return
        self._loop = asyncio.get_running_loop()
        read = Read(name, deque(parts), owner, key)
        waiter = self._waiters[read] = self._loop.create_future()
        self._flow.add(read)
        self._pump()
        try:
            await waiter
        finally:
            del self._waiters[read]
            if not read.settled:
                self._flow.stop(read, "given up")
                self._after_settled()
        if read.failure:
            raise ReadFailed(read.failure)

    def when_settled(self, key: Hashable, then: Callable[[], None]) -> None:
        """Call `then` once no read with this key is under way; now if none is."""
        if self._flow.of(key):
            self._on_settled.append((key, then))
        else:
            then()

    async def drain(self, key: Hashable, bound_s: float) -> bool:
        """Wait until no read with this key is under way; false: out of time."""
        return await _until(lambda: not self._flow.of(key), bound_s)

    async def stop(self, bound_s: float) -> bool:
        """Give up all reads; true once Mooncake has let go of all memory."""
        self._stopping = True
        for read in self._flow.all():
            self._flow.stop(read, "the transfer engine is closing")
            self._wake(read)
        clean = await _until(lambda: not self._flow.unsettled, bound_s)
        if self._poller:
            self._poller.cancel()
            await asyncio.wait([self._poller])
        return await asyncio.to_thread(self._submitter.stop, 1.0) and clean

    @property
    def parked(self) -> int:
        return self._flow.parked

    @property
    def outstanding(self) -> int:
        return self._flow.outstanding

    @property
    def stuck_s(self) -> float:
        """How long Mooncake is overdue with a call or an id; 0 in health."""
        oldest = min(self._submitted_at.values(), default=None)
        overdue = 0.0 if oldest is None else time.monotonic() - oldest - self._late_s
        return max(self._submitter.busy_s, overdue, 0.0)

    def _pump(self) -> None:
        """Submit what the windows allow: a job per session, so that one whose
        session must be opened delays the news of no other's ids."""
        for _, job in groupby(self._flow.take(), key=lambda entry: entry[0].name):
            self._submitter.put(list(job))

    def _deliver(self, results: list[Result]) -> None:
        """On the submitting thread."""
        assert self._loop is not None
        # RuntimeError: the loop is closed, nobody is left to poll these.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._on_submitted, results)

    def _on_submitted(self, results: list[Result]) -> None:
        now = time.monotonic()
        for read, batch_id in results:
            self._flow.submitted(read, batch_id)
            if batch_id is not None:
                self._submitted_at[batch_id] = now
            self._wake(read)
        self._pump()
        self._after_settled()
        if self._submitted_at and (self._poller is None or self._poller.done()):
            self._poller = asyncio.create_task(self._poll())
            self._poller.add_done_callback(_report)

    async def _poll(self) -> None:
        """Follow every id to its end. Runs only while there are any."""
        idle = 0
        while self._submitted_at:
            idle = 0 if self._sweep() else idle + 1
            await asyncio.sleep(_pause(idle))

    def _sweep(self) -> bool:
        """Ask after every id once; true if any ended."""
        before = len(self._submitted_at)
        for read in self._flow.under_way():
            for batch_id in list(read.ids):
                status = self._native.transfer_check_status(batch_id)
                # 0: waiting; -2: late, but Mooncake still works on it. Only 1 and -1
                # are ends, and an id is gone after its end: never ask again.
                if status in (1, -1):
                    del self._submitted_at[batch_id]
                    self._flow.finished(read, batch_id, ok=status == 1)
            self._wake(read)
        if len(self._submitted_at) == before:
            return False
        self._pump()
        self._after_settled()
        return True

    def _wake(self, read: Read) -> None:
        waiter = self._waiters.get(read)
        if waiter and not waiter.done() and (read.settled or read.stopped):
            waiter.set_result(None)

    def _after_settled(self) -> None:
        metrics.PARKED.set(self._flow.parked)
        due = [entry for entry in self._on_settled if not self._flow.of(entry[0])]
        for entry in due:
            self._on_settled.remove(entry)
            entry[1]()


def _report(poller: asyncio.Task[None]) -> None:
    """A poller that died leaves its ids unfollowed: say so (they show as stuck)."""
    if not poller.cancelled() and (error := poller.exception()):
        log.critical("transfer: following reads failed", exc_info=error)


async def _until(condition: Callable[[], bool], bound_s: float) -> bool:
    end = time.monotonic() + bound_s
    while not condition():
        if time.monotonic() >= end:
            return False
        await asyncio.sleep(0.005)
    return True


def _pause(idle: int) -> float:
    """Only give way after progress, then sleep longer and longer. (Looking more often
    at first gained nothing that could be measured and took CPU from Mooncake.)"""
    if idle == 0:
        return 0.0
    doublings = min(idle - 1, 16)  # a float overflows after 1024
    return min(_FIRST_PAUSE_S * 2.0**doublings, _LONGEST_PAUSE_S)
