"""Clients that mostly leave before their answer wait at the door while others are served.

What is done for a request that is given up is done for nothing, however quickly everything
stops: fair shares alone would let one client waste half of the service. So each client has
a credit of service that may be wasted, in seconds, up to `MOST_S`:

    given up before any output was delivered, after s seconds   -s
    answered after s seconds                                    +OWN * s
    another one's, answered after s                             +OTHERS * s

`OTHERS` is the share of their service that a storm can cost the others. A request is held
back, before anything is done for it, while its client has no credit, gave up more than half
of its latest requests, and others have requests running; within a client in order of
arrival, and `held_s` at most: nobody starves.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

MOST_S = 5.0
OWN = 0.25
OTHERS = 0.02
_MEMORY = 0.95
"""How much of a client's earlier requests still counts after one more."""


@dataclass(slots=True, eq=False)
class _Client:
    credit_s: float = MOST_S
    given_up: float = 0.0
    """Share of its latest requests."""
    mean_s: float = 0.0
    """That those took."""
    running: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)

    @property
    def exhausted(self) -> bool:
        """What runs may be given up as well."""
        return self.given_up > 0.5 and self.credit_s <= self.running * self.mean_s

    def count(self, wasted_s: float | None) -> None:
        """One request more; `wasted_s` if it was given up."""
        gone = wasted_s is not None
        self.given_up = _MEMORY * self.given_up + (1 - _MEMORY) * gone
        if wasted_s is not None:
            self.credit_s = max(-MOST_S, self.credit_s - wasted_s)
            before = self.mean_s or wasted_s
            self.mean_s = _MEMORY * before + (1 - _MEMORY) * wasted_s

    def earn(self, seconds: float) -> None:
        self.credit_s = min(MOST_S, self.credit_s + seconds)


class Visit:
    """One request that was let in; `end` it."""

    def __init__(self, door: Door, client: _Client, since: float) -> None:
        self._door, self._client, self._since = door, client, since
        self._delivered = False
        self._over = False

    def delivered(self) -> None:
        """Some output is with the client: what was done is not for nothing."""
        self._delivered = True

    def end(self, *, given_up: bool = False, answered: bool = False) -> None:
        """It is over: its client left, or has its answer, or (neither) it failed.
        Once or more often; the first word counts."""
        if not self._over:
            self._over = True
            left = given_up and not self._delivered
            self._door.ended(self._client, self._since, left, answered)


class Door:
    """One per gateway. There are as many clients as keys; `held_s` 0: nobody is held."""

    def __init__(self, held_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held_s = held_s
        self._clients: dict[Hashable, _Client] = {}

    @property
    def held(self) -> int:
        """Requests that wait here."""
        return sum(len(client.waiting) for client in self._clients.values())

    async def enter(self, name: Hashable) -> Visit:
        """Wait until a request of this client may go on. The caller must end the visit."""
        client = self._clients.setdefault(name, _Client())
        if self._held_s and (client.waiting or not self._may(client)):
            await self._wait(client)
        else:
            client.running += 1
        return Visit(self, client, self._clock())

    def _may(self, client: _Client) -> bool:
        others = (other for other in self._clients.values() if other is not client)
        return not client.exhausted or not any(other.running for other in others)

    async def _wait(self, client: _Client) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        client.waiting.append(place)
        try:
            await asyncio.wait([place], timeout=self._held_s)
        except asyncio.CancelledError:
            if place.done():  # let in and gone at once: nothing was done for it
                client.running -= 1
                self._let_in()
            raise
        finally:
            if not place.done():
                client.waiting.remove(place)
        if not place.done():
            client.running += 1

    def ended(self, client: _Client, since: float, given_up: bool, answered: bool) -> None:
        """See `Visit.end`."""
        seconds = self._clock() - since
        client.running -= 1
        client.count(seconds if given_up else None)
        if answered:
            for one in self._clients.values():
                one.earn((OWN if one is client else OTHERS) * seconds)
        self._let_in()

    def _let_in(self) -> None:
        for client in self._clients.values():
            while client.waiting and self._may(client):
                client.waiting.popleft().set_result(None)
                client.running += 1
