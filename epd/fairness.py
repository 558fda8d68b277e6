"""Whose turn it is: shares of clients that all want more. Pure.

Start-time fair queueing (Goyal et al. 1996) with tokens as the cost, as for language models
by Sheng et al. 2024 ("Fairness in Serving Large Language Models"): the turn is with the
client that was given least. Who comes back after a pause starts level with whoever is served
now, so nobody saves up turns, and nobody pays for having had the machine alone.

Invariants, for clients that want something all the time
    share       what two were given differs by one grant each at most
    first       who has the turn keeps it until it is charged: newcomers come behind
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Generic, TypeVar

_C = TypeVar("_C", bound=Hashable)
_T = TypeVar("_T")
_REMEMBERED = 1024
"""Clients; of more, those that were given least start level again."""


class Shares:
    """What each client was given so far."""

    def __init__(self) -> None:
        self._given: dict[Hashable, float] = {}
        self._level = 0.0
        """Of the last turn; it only rises."""

    def turn(self, wanting: Mapping[_C, int]) -> _C:
        """Who is next of those that want something: whoever was given least; of several,
        the one with the smallest number (the order of arrival)."""
        assert wanting
        chosen = min(wanting, key=lambda client: (self._of(client), wanting[client]))
        self._level = self._of(chosen)
        return chosen

    def charge(self, client: Hashable, amount: float) -> None:
        """`client` was given this much, in its turn."""
        self._given[client] = self._of(client) + amount
        if len(self._given) > _REMEMBERED:
            self._level = max(self._level, min(self._given.values()))
            self._given = {c: value for c, value in self._given.items() if value > self._level}

    def _of(self, client: Hashable) -> float:
        return max(self._given.get(client, 0.0), self._level)

    def __len__(self) -> int:
        return len(self._given)


def gives_way(waiting: Iterable[tuple[Hashable, int]], newcomer: Hashable) -> int | None:
    """Who leaves a full queue of (client, key), oldest first, for one more of `newcomer`: the
    last of the client that has most in it (longest queue drop, Suter et al. 1999). None if
    that client would have less in it than `newcomer` then: nobody gives way to an equal."""
    keys: dict[Hashable, list[int]] = {}
    for client, key in waiting:
        keys.setdefault(client, []).append(key)
    longest = max(keys.values(), key=len, default=[])
    if len(longest) <= len(keys.get(newcomer, ())) + 1:
        return None
    return longest[-1]


class Round(Generic[_T]):
    """One pass over what could be served now: within a client in the order given, between
    clients by `shares`."""

    def __init__(
        self, shares: Shares, items: Iterable[_T], client: Callable[[_T], Hashable]
    ) -> None:
        self._shares = shares
        self._queues: dict[Hashable, deque[_T]] = {}
        for item in items:
            self._queues.setdefault(client(item), deque()).append(item)
        self._places = {client: place for place, client in enumerate(self._queues)}
        self._client: Hashable = None

    def first(self) -> _T | None:
        """Whose turn it is: it stays first until it is taken or skipped."""
        if not self._queues:
            return None
        self._client = self._shares.turn({c: self._places[c] for c in self._queues})
        return self._queues[self._client][0]

    def take(self, cost: float) -> None:
        """The first one is served, at this cost."""
        self._shares.charge(self._client, cost)
        self.skip()

    def skip(self) -> None:
        """The first one can't be served in this round."""
        queue = self._queues[self._client]
        queue.popleft()
        if not queue:
            del self._queues[self._client]


class FairQueue:
    """Keys that wait: within a client in the order of `add`, between clients by shares."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, dict[int, int]] = {}  # client -> key -> number
        self._clients: dict[int, Hashable] = {}
        self._numbers = itertools.count()
        self._shares = Shares()

    def __len__(self) -> int:
        return len(self._clients)

    def __contains__(self, key: int) -> bool:
        return key in self._clients

    def add(self, key: int, client: Hashable) -> None:
        assert key not in self._clients
        self._clients[key] = client
        self._queues.setdefault(client, {})[key] = next(self._numbers)

    def first(self) -> int | None:
        """Whose turn it is: it stays first until it is taken or leaves."""
        if not self._queues:
            return None
        oldest = {client: next(iter(queue.values())) for client, queue in self._queues.items()}
        return next(iter(self._queues[self._shares.turn(oldest)]))

    def take(self, key: int, cost: float) -> None:
        """The first one got what it waited for."""
        self._shares.charge(self._clients[key], cost)
        self.drop(key)

    def drop(self, key: int) -> None:
        """It leaves, if it is here."""
        if key not in self._clients:
            return
        client = self._clients.pop(key)
        queue = self._queues[client]
        del queue[key]
        if not queue:
            del self._queues[client]
