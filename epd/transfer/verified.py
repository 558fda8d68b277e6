"""Reading announced spans, each compared with its sum when all are here.

Not while later ones are on their way: on two cores, which the sender's and the receiver's
thread fill, that takes as long (docs/transfer.md) and is more to get wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence

from epd.errors import EpdError
from epd.transfer import metrics
from epd.transfer.checksum import verify_at
from epd.transfer.contract import Peer, Span
from epd.transfer.engine import Engine, ReadStats
from epd.transfer.pieces import Piece

INLINE_BYTES = 256 << 10
"""Sums over no more than this are computed at once (20 us): a thread costs more."""
_THREADS = 2
"""For more. A sum runs at the speed of memory, which two threads use well."""


async def read_verified(
    engine: Engine,
    peer: Peer,
    fingerprint: str,
    spans: Sequence[tuple[int, Span]],
    owner: object,
    deadline_s: float,
    *,
    what: str,
    kind: str = "kv",
    key: Hashable = None,
) -> ReadStats:
    """Read each of the peer's spans to the local address beside it; returns when all are
    here and have the sums that were announced. Local addresses don't overlap. The rest is
    as in `Engine.read`; `what` names the bytes in an error.

    Raises:
        EpdError: CHECKSUM_MISMATCH, counted; and what `Engine.read` raises.
    """
    pieces = [Piece(local, span.address, span.length) for local, span in spans]
    stats = await engine.read(peer, fingerprint, pieces, owner, deadline_s, kind=kind, key=key)
    try:
        if stats.nbytes <= INLINE_BYTES:
            _verify(0, spans, what, owner)
        else:
            await _verify_much(spans, what, owner)
    except EpdError:
        metrics.FAILURES.labels(kind, "checksum").inc()
        raise
    return stats


async def _verify_much(spans: Sequence[tuple[int, Span]], what: str, owner: object) -> None:
    """The event loop goes on meanwhile. Of several spans that differ, the first is named."""
    size = -(-len(spans) // _THREADS)
    parts = [
        asyncio.to_thread(_verify, first, spans[first : first + size], what, owner)
        for first in range(0, len(spans), size)
    ]
    for failure in await asyncio.gather(*parts, return_exceptions=True):
        if failure is not None:
            raise failure


def _verify(first: int, spans: Sequence[tuple[int, Span]], what: str, owner: object) -> None:
    """Spans from the `first` on. `owner`'s memory is what was read to; it is referred to as
    long as this runs, also when nobody waits for it any more."""
    for number, (address, span) in enumerate(spans, first):
        verify_at(address, span.length, span.checksum, f"{what}, span {number}")
