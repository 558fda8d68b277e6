"""Reading announced spans, each compared with its sum while later ones are on their way.

    Engine.read --a part is here--> Arrivals: which spans are whole now
                                      --> Verifier: their sums, on a thread

The sender's core is the slower one on loopback, so the receiver's has time for the sums.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import Hashable, Sequence

from epd.errors import EpdError
from epd.transfer import metrics
from epd.transfer.checksum import verify_at
from epd.transfer.contract import Peer, Span
from epd.transfer.engine import Engine, ReadStats
from epd.transfer.pieces import Piece

INLINE_BYTES = 256 << 10
"""Sums over no more than this are computed at once (20 us): a thread costs more."""


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
    verifier = Verifier(spans, what, owner)
    pieces = [Piece(local, span.address, span.length) for local, span in spans]
    stats = await engine.read(
        peer, fingerprint, pieces, owner, deadline_s, kind=kind, key=key, arrived=verifier.arrived
    )
    try:
        await verifier.finish()
    except EpdError:
        metrics.FAILURES.labels(kind, "checksum").inc()
        raise
    return stats


class Arrivals:
    """Which spans of local memory are whole, told part by part. Pure."""

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        """Of (address, bytes), in any order; no two overlap. Empty ones are never told of."""
        filled = [i for i, (_, nbytes) in enumerate(spans) if nbytes]
        self._order = sorted(filled, key=lambda i: spans[i][0])
        self._starts = [spans[i][0] for i in self._order]
        self._missing = [spans[i][1] for i in self._order]
        self._ends = [spans[i][0] + spans[i][1] for i in self._order]

    def add(self, part: Piece) -> list[int]:
        """Bytes that are here now, each told once. Returns the places of the spans that
        this completes."""
        whole = []
        end = part.local + part.length
        at = max(0, bisect_right(self._starts, part.local) - 1)
        while at < len(self._starts) and self._starts[at] < end:
            here = min(end, self._ends[at]) - max(part.local, self._starts[at])
            if here > 0:
                self._missing[at] -= here
                assert self._missing[at] >= 0, "a byte arrived twice"
                if not self._missing[at]:
                    whole.append(self._order[at])
            at += 1
        return whole


class Verifier:
    """The sums of one read. Belongs to the event loop but for `_work`, on a thread, one at
    a time."""

    def __init__(self, spans: Sequence[tuple[int, Span]], what: str, owner: object) -> None:
        """`owner`'s memory is what is read to; it is referred to as long as this."""
        self._spans = spans
        self._what = what
        self._owner = owner
        self._arrivals = Arrivals([(local, span.length) for local, span in spans])
        self._whole = deque(i for i, (_, span) in enumerate(spans) if not span.length)
        self._left = len(spans)
        self._summing: asyncio.Task[None] | None = None
        self._failure: EpdError | None = None

    def arrived(self, part: Piece) -> None:
        """These bytes are here."""
        self._whole.extend(self._arrivals.add(part))
        self._start()

    async def finish(self) -> None:
        """Every byte was told to have arrived.

        Raises:
            EpdError: CHECKSUM_MISMATCH, of the first span that was found to differ.
        """
        self._start()
        if self._summing:
            await self._summing
        if self._failure:
            raise self._failure
        assert not self._left, "bytes that nobody told of"

    def _start(self) -> None:
        if self._failure or not self._whole or (self._summing and not self._summing.done()):
            return
        if sum(self._spans[i][1].length for i in self._whole) <= INLINE_BYTES:
            self._work()
        else:
            self._summing = asyncio.create_task(self._sum(), name="sums")

    async def _sum(self) -> None:
        """Until there is nothing to sum; what becomes whole meanwhile is seen."""
        loop = asyncio.get_running_loop()
        while self._whole and not self._failure:
            await loop.run_in_executor(None, self._work)

    def _work(self) -> None:
        while self._whole and not self._failure:
            number = self._whole.popleft()
            address, span = self._spans[number]
            try:
                verify_at(address, span.length, span.checksum, f"{self._what}, span {number}")
            except EpdError as error:
                self._failure = error
            self._left -= 1
