"""Merging never changes which byte goes where."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from epd.transfer.pieces import Piece, merge


def moves(pieces: list[Piece]) -> list[tuple[int, int]]:
    """Every (local, remote) byte address in order."""
    return [(p.local + i, p.remote + i) for p in pieces for i in range(p.length)]


pieces = st.lists(
    st.builds(Piece, st.integers(0, 60), st.integers(100, 160), st.integers(0, 9)), max_size=12
)


@given(pieces, st.integers(1, 16))
def test_moves_exactly_the_same_bytes(given_pieces: list[Piece], chunk: int) -> None:
    merged = merge(given_pieces, chunk)
    assert moves(merged) == moves(given_pieces)
    assert all(0 < piece.length <= chunk for piece in merged)


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 64))
def test_neighbouring_blocks_take_the_fewest_descriptors(n: int, size: int, chunk: int) -> None:
    blocks = [Piece(i * size, 1000 + i * size, size) for i in range(n)]
    assert len(merge(blocks, chunk)) == -(-n * size // chunk)


def test_neighbours_on_one_side_only_stay_apart() -> None:
    local_only = [Piece(0, 100, 10), Piece(10, 200, 10)]
    remote_only = [Piece(0, 100, 10), Piece(50, 110, 10)]
    assert merge(local_only) == local_only
    assert merge(remote_only) == remote_only


def test_empty_pieces_vanish_without_splitting_a_run() -> None:
    assert merge([Piece(0, 100, 5), Piece(7, 7, 0), Piece(5, 105, 5)]) == [Piece(0, 100, 10)]
    assert merge([]) == []
