"""Which worker gets a piece of work. Pure: no I/O, no clock, no registry.

`load` is requests running and waiting. Encoders are chosen by the image's digest
(the same picture goes where its embedding may still be), unless that worker has
far more than its share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from blake3 import blake3

_LOAD_BOUND = 1.25
"""Times the mean load that a preferred worker may have (consistent hashing with
bounded loads, Mirrokni et al. 2018)."""


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


def nearest(candidates: Sequence[C], near: C, turn: int) -> C:
    """`near`, where handing over costs least, unless it has far more than its share."""
    if any(candidate is near for candidate in candidates) and not _overloaded(near, candidates):
        return near
    return least_loaded(candidates, turn)


def _overloaded(one: C, candidates: Sequence[C]) -> bool:
    mean = (1 + sum(candidate.load for candidate in candidates)) / len(candidates)
    return one.load >= 1 + _LOAD_BOUND * mean


def for_digest(candidates: Sequence[C], digest: bytes) -> C:
    """Rendezvous hashing: the same digest goes to the same worker while it lives, and
    a joining or leaving worker moves only its own share. Skips workers over the bound."""
    assert candidates
    ranked = sorted(candidates, key=lambda c: blake3(c.identity + digest).digest())
    return next((c for c in ranked if not _overloaded(c, candidates)), ranked[0])
