"""What to copy from where to where, and how to say it in few descriptors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

CHUNK_BYTES = 4 << 20
"""Longest descriptor. Long enough that its 30-75 us don't show (4 MiB take about
2 ms on loopback), short enough that a cancelled read is soon over and that two
reads share a connection fairly. 64 MiB are then one for each of Mooncake's connections
(measured: docs/transfer.md)."""


class Piece(NamedTuple):
    """`length` bytes at `remote` (the owner's address) go to `local`."""

    local: int
    remote: int
    length: int


def merge(pieces: Iterable[Piece], chunk: int = CHUNK_BYTES) -> list[Piece]:
    """Join neighbours and cut to `chunk`: same bytes, few descriptors.

    Two pieces are neighbours when the second begins where the first ends on
    *both* sides. Order is kept; empty pieces vanish.
    """
    return [part for run in _runs(pieces) for part in _cut(run, chunk)]


def _runs(pieces: Iterable[Piece]) -> Iterator[Piece]:
    run: Piece | None = None
    for piece in pieces:
        assert piece.length >= 0, piece
        if piece.length == 0:
            continue
        if (
            run
            and run.local + run.length == piece.local
            and (run.remote + run.length == piece.remote)
        ):
            run = Piece(run.local, run.remote, run.length + piece.length)
            continue
        if run:
            yield run
        run = piece
    if run:
        yield run


def _cut(run: Piece, chunk: int) -> Iterator[Piece]:
    for start in range(0, run.length, chunk):
        length = min(chunk, run.length - start)
        yield Piece(run.local + start, run.remote + start, length)
