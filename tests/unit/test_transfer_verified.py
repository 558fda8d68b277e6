"""Sums are compared as spans become whole: every span once, none before it is here."""

from __future__ import annotations

import asyncio
import ctypes
import random
from collections.abc import Callable, Hashable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.errors import EpdError, ErrorKind
from epd.transfer.checksum import checksum
from epd.transfer.contract import Peer, Span
from epd.transfer.engine import ReadStats
from epd.transfer.pieces import Piece, merge
from epd.transfer.verified import INLINE_BYTES, Arrivals, Verifier, read_verified

Spans = list[tuple[int, Span]]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), min_size=1, max_size=12),
    st.integers(1, 50),
    st.randoms(use_true_random=False),
)
def test_a_span_is_whole_with_its_last_byte(
    gaps: list[tuple[int, int]], chunk: int, rng: random.Random
) -> None:
    spans, at = [], 1000
    for gap, length in gaps:
        spans.append((at + gap, length))
        at += gap + length
    rng.shuffle(spans)
    parts = merge([Piece(start, start, length) for start, length in spans], chunk)
    rng.shuffle(parts)
    arrivals = Arrivals(spans)
    here: set[int] = set()
    found: list[int] = []
    for part in parts:
        here.update(range(part.local, part.local + part.length))
        whole = {
            i for i, (start, n) in enumerate(spans) if n and here >= {*range(start, start + n)}
        }
        found += arrivals.add(part)
        assert sorted(found) == sorted(whole)


class Memory:
    """`count` spans of `nbytes` each, and what they should hold."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.bytes = bytearray(random.Random(1).randbytes(count * nbytes))
        self._exported = (ctypes.c_char * len(self.bytes)).from_buffer(self.bytes)
        self.address = ctypes.addressof(self._exported)
        view = memoryview(self.bytes)
        places = range(0, count * nbytes, nbytes)
        self.spans: Spans = [
            (self.address + at, Span(at, nbytes, checksum(view[at : at + nbytes]))) for at in places
        ]

    def part(self, start: int, stop: int) -> Piece:
        return Piece(self.address + start, start, stop - start)


class ReadAtOnce:
    """Stands in for the engine: everything is here."""

    async def read(
        self, peer: Peer, fingerprint: str, pieces: Sequence[Piece], owner: object,
        deadline_s: float, *, kind: str, key: Hashable, arrived: Callable[[Piece], None],
    ) -> ReadStats:  # fmt: skip
        for part in merge(pieces):
            arrived(part)
        return ReadStats(sum(piece.length for piece in pieces), 0.0, 1)


async def read(memory: Memory) -> ReadStats:
    peer = Peer("a:1", 1, 2)
    return await read_verified(
        ReadAtOnce(),  # type: ignore[arg-type]
        peer,
        "f00d",
        memory.spans,
        memory,
        1.0,
        what="block",
    )


@pytest.mark.parametrize("nbytes", [100, INLINE_BYTES + 1, 9 << 20])
async def test_good_bytes_pass_and_a_changed_one_is_named(nbytes: int) -> None:
    memory = Memory(3, nbytes)
    assert (await read(memory)).nbytes == 3 * nbytes
    memory.bytes[2 * nbytes - 1] ^= 1
    with pytest.raises(EpdError, match="block, span 1") as caught:
        await read(memory)
    assert caught.value.kind is ErrorKind.CHECKSUM_MISMATCH


async def test_spans_are_summed_while_later_ones_are_on_their_way() -> None:
    memory = Memory(4, INLINE_BYTES + 1)
    size = INLINE_BYTES + 1
    verifier = Verifier(memory.spans, "block", memory)
    verifier.arrived(memory.part(0, 3 * size - 1))
    while verifier._left > 2:
        await asyncio.sleep(0.001)
    memory.bytes[0] ^= 1  # too late to be seen: the first was summed already
    memory.bytes[3 * size - 1] ^= 1  # not here yet
    verifier.arrived(memory.part(3 * size - 1, 4 * size))
    with pytest.raises(EpdError, match="span 2"):
        await verifier.finish()


async def test_spans_that_become_whole_during_a_sum_are_not_forgotten() -> None:
    memory = Memory(64, INLINE_BYTES // 2)
    size = INLINE_BYTES // 2
    verifier = Verifier(memory.spans, "block", memory)
    verifier.arrived(memory.part(0, 3 * size))
    for at in range(3, 64):
        verifier.arrived(memory.part(at * size, (at + 1) * size))
        await asyncio.sleep(0)
    await verifier.finish()
    assert verifier._left == 0


async def test_empty_spans_have_a_sum_too() -> None:
    empty = checksum(b"")
    await Verifier([(8, Span(8, 0, empty))], "row", None).finish()
    with pytest.raises(EpdError):
        await Verifier([(8, Span(8, 0, empty ^ 1))], "row", None).finish()
