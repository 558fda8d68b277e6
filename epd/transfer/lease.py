"""The owner's side of a hand-off: bytes stay pinned while a stream is open.

    announce ---> open --- release (clean end) ------------------> freed at once
                   |
                   +------ lost (contact lost) --> quarantined --> freed by sweep(now)

A lost reader may still be reading, so its bytes wait for the read
deadline plus a margin. Bytes that were never announced are none of this file's
business: whoever allocated them frees them at once.

Pure: time comes from outside, and memory is known only by a `free` callback.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import StrEnum

from epd.errors import EpdError, ErrorKind


class LeaseState(StrEnum):
    OPEN = "open"
    QUARANTINED = "quarantined"
    FREED = "freed"


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes that were announced together."""

    nbytes: int
    free: Callable[[], None]
    shared: Hashable
    """Names bytes that other leases cover too: in quarantine they count once."""


@dataclass(slots=True, eq=False)
class Lease:
    """Announced bytes of one stream. Made and ended by its `LeaseTable` only."""

    key: str
    """Request id, for logs."""
    state: LeaseState = LeaseState.OPEN
    _pieces: list[_Piece] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self._pieces)


class LeaseTable:
    """All leases of one worker.

    `hold_s` is read deadline plus margin; `max_quarantined` caps the bytes that
    lost readers can withhold: above it, new announcements are refused.
    """

    def __init__(self, hold_s: float, max_quarantined: int) -> None:
        self.hold_s = hold_s
        self.max_quarantined = max_quarantined
        self._open: set[Lease] = set()
        self._quarantined: list[tuple[float, int, Lease]] = []  # heap by end of quarantine
        self._order = itertools.count()
        self._quarantined_bytes = 0
        self._lost_shares: Counter[Hashable] = Counter()

    def announce(
        self, key: str, nbytes: int, free: Callable[[], None], shared: Hashable = None
    ) -> Lease:
        """Open a lease on bytes that a reader is about to be told of.

        `free` is called exactly once, from `release` or `sweep`. Leases with the same
        `shared` (not None) cover the same bytes.

        Raises:
            EpdError: OVERLOADED, too much memory waits for lost readers; `free`
                is not called, the bytes are still the caller's.
        """
        if self._quarantined_bytes >= self.max_quarantined:
            raise EpdError(
                ErrorKind.OVERLOADED,
                f"{self._quarantined_bytes} bytes wait for lost readers "
                f"(limit {self.max_quarantined})",
                retry_after_s=self.hold_s,
            )
        lease = Lease(key)
        self._open.add(lease)
        self.extend(lease, nbytes, free, shared)
        return lease

    def extend(
        self, lease: Lease, nbytes: int, free: Callable[[], None], shared: Hashable = None
    ) -> None:
        """Put more announced bytes under an open lease (KV of a later chunk)."""
        assert lease.state is LeaseState.OPEN, lease
        lease._pieces.append(_Piece(nbytes, free, shared))

    def release(self, lease: Lease) -> None:
        """The reader said that it is done: the bytes are reusable now."""
        self._close(lease)
        self._free(lease)

    def lost(self, lease: Lease, now: float) -> None:
        """Contact was lost: keep the bytes until no read can be under way."""
        self._close(lease)
        lease.state = LeaseState.QUARANTINED
        for piece in lease._pieces:
            if piece.shared is None or not self._lost_shares[piece.shared]:
                self._quarantined_bytes += piece.nbytes
            if piece.shared is not None:
                self._lost_shares[piece.shared] += 1
        heapq.heappush(self._quarantined, (now + self.hold_s, next(self._order), lease))

    def sweep(self, now: float) -> int:
        """Free what has waited long enough; returns the number of bytes freed."""
        freed = 0
        while self._quarantined and self._quarantined[0][0] <= now:
            _, _, lease = heapq.heappop(self._quarantined)
            freed += sum(piece.nbytes for piece in lease._pieces if self._last_of(piece))
            self._free(lease)
        self._quarantined_bytes -= freed
        return freed

    def _last_of(self, piece: _Piece) -> bool:
        """Whether no other lost lease covers these bytes; they are about to be freed."""
        if piece.shared is None:
            return True
        self._lost_shares[piece.shared] -= 1
        if self._lost_shares[piece.shared]:
            return False
        del self._lost_shares[piece.shared]
        return True

    @property
    def open_count(self) -> int:
        return len(self._open)

    @property
    def open_bytes(self) -> int:
        return sum(lease.nbytes for lease in self._open)

    @property
    def quarantined_bytes(self) -> int:
        return self._quarantined_bytes

    def check_integrity(self) -> None:
        """Assert that states, sums and places agree."""
        waiting = [lease for _, _, lease in self._quarantined]
        assert all(lease.state is LeaseState.OPEN for lease in self._open)
        assert all(lease.state is LeaseState.QUARANTINED for lease in waiting)
        pieces = [piece for lease in waiting for piece in lease._pieces]
        own = sum(piece.nbytes for piece in pieces if piece.shared is None)
        shared = {piece.shared: piece.nbytes for piece in pieces if piece.shared is not None}
        assert self._quarantined_bytes == own + sum(shared.values())
        assert all(lease._pieces for lease in [*self._open, *waiting])

    def _close(self, lease: Lease) -> None:
        assert lease in self._open, f"lease {lease.key} is {lease.state}"
        self._open.remove(lease)

    def _free(self, lease: Lease) -> None:
        lease.state = LeaseState.FREED
        pieces, lease._pieces = lease._pieces, []
        for piece in reversed(pieces):  # of a sequence the end first: it is evicted first
            piece.free()
