"""Until when a request may take, and whose wish that is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from epd.errors import EpdError, ErrorKind


class Deadline:
    """Of one request. A gateway that ends before it brings it forward (`end`)."""

    def __init__(self, at: float, clients: bool = False) -> None:
        """`at` is on the event loop's clock; `clients`: its client's own, sooner than the
        gateway's."""
        self.at = at
        self._clients = clients
        self._ended: EpdError | None = None
        self._bounds: set[asyncio.Timeout] = set()

    @classmethod
    def of(cls, longest_s: float, asked_s: float | None = None) -> Deadline:
        """From now: the gateway's `longest_s`, or what the client asked for if that is less."""
        now = asyncio.get_running_loop().time()
        if asked_s is None or asked_s >= longest_s:
            return cls(now + longest_s)
        return cls(now + asked_s, clients=True)

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """For what is done until then. A TimeoutError of another making goes on as it is: that
        is a fault of ours, and nobody's deadline.

        Raises:
            EpdError: its time is over: DEADLINE_EXCEEDED, or why it was ended.
        """
        bound = asyncio.timeout_at(self.at)
        self._bounds.add(bound)
        try:
            async with bound:
                yield
        except TimeoutError:
            if bound.expired():
                raise self._passed() from None
            raise
        finally:
            self._bounds.discard(bound)

    def end(self, error: EpdError) -> None:
        """The request's time is over now, for this reason."""
        self._ended = error
        self.at = asyncio.get_running_loop().time()
        for bound in self._bounds:
            if not bound.expired():
                bound.reschedule(self.at)

    def _passed(self) -> EpdError:
        if self._ended is not None:
            return self._ended
        reason = "the request's deadline has passed"
        return EpdError(ErrorKind.DEADLINE_EXCEEDED, reason, by_client=self._clients)
