"""Events of one stream on their way from the worker to the servicer.

The worker never waits for a slow reader: it puts, and the servicer takes
everything that has gathered. Bounded by what one request can produce.
"""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

Event = TypeVar("Event")


class Mailbox(Generic[Event]):
    """One producer side, one consumer."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._arrived = asyncio.Event()
        self._closed = False
        self._error: BaseException | None = None

    def put(self, event: Event) -> None:
        """Ignored after `close`: the stream is over."""
        if not self._closed:
            self._events.append(event)
            self._arrived.set()

    def close(self, error: BaseException | None = None) -> None:
        """Nothing more comes. With an error, the consumer sees it after the events
        that were put before. The first close counts."""
        if not self._closed:
            self._closed = True
            self._error = error
            self._arrived.set()

    @property
    def closed(self) -> bool:
        return self._closed

    async def take(self) -> list[Event]:
        """All events since the last take; empty once when it is closed and drained.

        Raises:
            What `close` was given.
        """
        await self._arrived.wait()
        events, self._events = self._events, []
        if not self._closed:
            self._arrived.clear()
        if not events and self._error is not None:
            raise self._error
        return events
