"""Drives Mooncake: submits what `flow.py` allows, follows every id to its end.

run() --> Flow --> Submitter (a thread) --> ids --> Watcher (a thread) --> done
                                                |
     failed, timed out, cancelled: parked, owner pinned until the ids end
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Hashable
from itertools import groupby
from typing import TypeVar

from epd.transfer import metrics
from epd.transfer.flow import Flow, Read
from epd.transfer.pieces import Piece
from epd.transfer.submitter import Native, Result, Submitter
from epd.transfer.watcher import Ended, Watcher

Item = TypeVar("Item")


class ReadFailed(Exception):
    """Mooncake refused or failed a descriptor, or the driver has stopped."""


class Driver:
    """All reads of one engine. Belongs to one event loop, that of its first read.

    `late_s`: when an id is older than this, Mooncake breaks its own timeouts.
    """

    def __init__(self, native: Native, late_s: float) -> None:
        self._late_s = late_s
        self._flow = Flow()
        self._submitter = Submitter(native, lambda results: self._tell(self._submitted, results))
        self._watcher = Watcher(native, lambda ended: self._tell(self._ended, ended))
        self._waiters: dict[Read, asyncio.Future[None]] = {}
        self._on_settled: list[tuple[Hashable, Callable[[], None]]] = []
        self._under_way: dict[int, tuple[Read, float]] = {}
        """What Mooncake works on, by ticket: whose, and since when."""
        self._tickets = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False

    async def run(
        self,
        name: str,
        parts: list[Piece],
        owner: object,
        key: Hashable,
    ) -> None:
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
        stopped = await asyncio.gather(
            asyncio.to_thread(self._submitter.stop, 1.0), asyncio.to_thread(self._watcher.stop, 1.0)
        )
        return clean and all(stopped)

    @property
    def parked(self) -> int:
        return self._flow.parked

    @property
    def outstanding(self) -> int:
        return self._flow.outstanding

    @property
    def stuck_s(self) -> float:
        """How long Mooncake is overdue with a call or an id; 0 in health."""
        oldest = min((since for _, since in self._under_way.values()), default=None)
        overdue = 0.0 if oldest is None else time.monotonic() - oldest - self._late_s
        return max(self._submitter.busy_s, overdue, 0.0)

    def _pump(self) -> None:
        """Submit what the windows allow: a job per session, so that one whose
        session must be opened delays the news of no other's ids."""
        for _, job in groupby(self._flow.take(), key=lambda entry: entry[0].name):
            self._submitter.put(list(job))

    def _tell(self, receive: Callable[[Item], None], news: Item) -> None:
        """On the submitting or the watching thread."""
        assert self._loop is not None
        # RuntimeError: the loop is closed, nobody is left to hear of it.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(receive, news)

    def _submitted(self, results: list[Result]) -> None:
        now = time.monotonic()
        for read, _, batch_id in results:
            ticket = None if batch_id is None else next(self._tickets)
            self._flow.submitted(read, ticket)
            if ticket is not None and batch_id is not None:
                self._under_way[ticket] = (read, now)
                self._watcher.watch(ticket, batch_id)
            self._wake(read)
        self._pump()
        self._after_settled()

    def _ended(self, ended: Ended) -> None:
        for ticket, ok in ended:
            read, _ = self._under_way.pop(ticket)
            self._flow.finished(read, ticket, ok=ok)
            self._wake(read)
        self._pump()
        self._after_settled()

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


async def _until(condition: Callable[[], bool], bound_s: float) -> bool:
    end = time.monotonic() + bound_s
    while not condition():
        if time.monotonic() >= end:
            return False
        await asyncio.sleep(0.005)
    return True
