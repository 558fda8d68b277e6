"""Which worker gets a piece of work. Pure: no I/O, no clock, no registry.

`load` is requests running and waiting. An image goes to the encoder that would have it
done first: what waits there and the image itself, in rows times what a row costs there.
One that has the image already only has its queue to count. Among those that are about as
good, the image's digest decides (rendezvous hashing), so that all gateways send the same
picture to the same encoder, where its embedding may be kept. A prompt goes to the prefill
and the decode that were sent most of its beginning.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Protocol, TypeVar

from blake3 import blake3

_LOAD_BOUND = 1.25
"""Times the mean load that a preferred worker may have (consistent hashing with
bounded loads, Mirrokni et al. 2018)."""
_AFFINITY = 0.5
"""Of an image's own cost: how much later it may be done where its digest belongs."""


class Candidate(Protocol):
    @property
    def load(self) -> int: ...
    @property
    def identity(self) -> bytes: ...


C = TypeVar("C", bound=Candidate)


def least_loaded(candidates: Sequence[C], turn: int) -> C:
    """The one with least work; ties go round by `turn`."""
    assert candidates
    least = min(candidate.load for candidate in candidates)
    best = [candidate for candidate in candidates if candidate.load == least]
    return best[turn % len(best)]


def may_stay(candidates: Sequence[C], near: C) -> bool:
    """Whether `near`, where handing over costs least, can be chosen: unless it has far
    more than its share."""
    here = any(candidate is near for candidate in candidates)
    return here and not _overloaded(near, candidates)


def _overloaded(one: C, candidates: Sequence[C]) -> bool:
    mean = (1 + sum(candidate.load for candidate in candidates)) / len(candidates)
    return one.load >= 1 + _LOAD_BOUND * mean


class Keeper(Candidate, Protocol):
    @property
    def life(self) -> Hashable:
        """Another one after a restart: it keeps nothing of the life before."""
        ...


K = TypeVar("K", bound=Keeper)


def for_prefix(candidates: Sequence[K], beginning: Sequence[bytes], kept: Kept, turn: int) -> K:
    """The worker that was sent most of this prompt's beginning, whose KV it may still have,
    unless it has far more than its share of work; `beginning` is named shortest first."""

    def known(candidate: K) -> int:
        have = (kept.has(name, candidate.life) for name in beginning)
        return sum(itertools.takewhile(bool, have))

    most = max(known(candidate) for candidate in candidates)
    holders = [c for c in candidates if known(c) == most and not _overloaded(c, candidates)]
    return least_loaded(holders or candidates, turn)


class Encoder(Keeper, Protocol):
    @property
    def rows_ahead(self) -> int:
        """Rows of the images that would be encoded before a new one."""
        ...

    @property
    def us_per_row(self) -> float:
        """Measured; 0: not known yet."""
        ...


E = TypeVar("E", bound=Encoder)


class Kept:
    """Which worker was sent which image, or beginning of a prompt: what it may hold, or is
    making. Bounded: what was sent longest ago is forgotten, as a worker's own cache does."""

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._sent: OrderedDict[tuple[bytes, Hashable], None] = OrderedDict()

    def sent(self, digest: bytes, encoder: Hashable) -> None:
        self._sent[digest, encoder] = None
        self._sent.move_to_end((digest, encoder))
        while len(self._sent) > self._most:
            self._sent.popitem(last=False)

    def forget(self, digest: bytes, encoder: Hashable) -> None:
        """It did not come to an embedding."""
        self._sent.pop((digest, encoder), None)

    def has(self, digest: bytes, encoder: Hashable) -> bool:
        return (digest, encoder) in self._sent

    def __len__(self) -> int:
        return len(self._sent)


def for_image(candidates: Sequence[E], digest: bytes, rows: int, kept: Kept) -> E:
    """The encoder that has the image's rows first, or nearly so and where it belongs.

    A joining or leaving encoder moves only its own share of idle encoders' digests.
    """
    assert candidates
    known = [candidate.us_per_row for candidate in candidates if candidate.us_per_row > 0]
    usual = sum(known) / len(known) if known else 1.0

    def done_in(candidate: E) -> float:
        own = 0 if kept.has(digest, candidate.life) else rows
        return (candidate.rows_ahead + own) * (candidate.us_per_row or usual)

    soonest = min(map(done_in, candidates))
    ranked = sorted(candidates, key=lambda c: blake3(c.identity + digest).digest())
    for candidate in ranked:  # encoding it twice is worth nothing where nobody is sooner
        if kept.has(digest, candidate.life) and done_in(candidate) <= soonest:
            return candidate
    bound = soonest + _AFFINITY * rows * usual
    return next(candidate for candidate in ranked if done_in(candidate) <= bound)
