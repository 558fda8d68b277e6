"""Places for work that not all can do at once: who waits is let in by turns of clients.

A semaphore lets in by arrival, so that one client's hundred pieces of work go before another
client's one. Here that one comes second (`epd.fairness`), and within a client the first first.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

from epd.fairness import FairQueue


class Turns:
    """`places` pieces of work at once. Of one event loop."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._queue = FairQueue()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._numbers = itertools.count()

    async def acquire(self, client: Hashable) -> None:
        """Wait for a place, which must be given back (`release`)."""
        key, place = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[key] = place
        self._queue.add(key, client)
        self._let_in()
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():
                self._queue.drop(key)
                self._waiting.pop(key, None)
            else:  # let in and gone at once
                self.release()
            raise

    def release(self) -> None:
        self._free += 1
        self._let_in()

    @asynccontextmanager
    async def place(self, client: Hashable) -> AsyncIterator[None]:
        """A place while it is open."""
        await self.acquire(client)
        try:
            yield
        finally:
            self.release()

    def _let_in(self) -> None:
        while self._free and (key := self._queue.first()) is not None:
            place = self._waiting.pop(key)
            if place.cancelled():  # its task has not run since
                self._queue.drop(key)
                continue
            self._queue.take(key, 1.0)
            self._free -= 1
            place.set_result(None)
