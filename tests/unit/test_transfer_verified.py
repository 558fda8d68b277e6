"""Sums of what was read: of every span, once all are here."""

from __future__ import annotations

import asyncio
import ctypes
import random
from collections.abc import Hashable, Sequence

import pytest

from epd.errors import EpdError, ErrorKind
from epd.transfer import metrics
from epd.transfer.checksum import checksum
from epd.transfer.contract import Peer, Span
from epd.transfer.engine import ReadStats
from epd.transfer.pieces import Piece
from epd.transfer.verified import INLINE_BYTES, read_verified
from tests.readings import reading

Spans = list[tuple[int, Span]]


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


class ReadAtOnce:
    """Stands in for the engine: everything is here."""

    async def read(
        self, peer: Peer, fingerprint: str, pieces: Sequence[Piece], owner: object,
        deadline_s: float, *, kind: str, key: Hashable,
    ) -> ReadStats:  # fmt: skip
        return ReadStats(sum(piece.length for piece in pieces), 0.0, 1)


async def read(spans: Spans, owner: object) -> ReadStats:
    peer = Peer("a:1", 1, 2)
    engine = ReadAtOnce()
    return await read_verified(
        engine,  # type: ignore[arg-type]
        peer,
        "f00d",
        spans,
        owner,
        1.0,
        what="block",
    )


def failures() -> float:
    return reading(metrics.FAILURES.labels("kv", "checksum"))


@pytest.mark.parametrize("nbytes", [100, INLINE_BYTES + 1, 9 << 20])
async def test_good_bytes_pass_and_a_changed_one_is_named(nbytes: int) -> None:
    memory, before = Memory(3, nbytes), failures()
    assert (await read(memory.spans, memory)).nbytes == 3 * nbytes
    for span in range(3):
        memory.bytes[(span + 1) * nbytes - 1] ^= 1
        with pytest.raises(EpdError, match=f"block, span {span}") as caught:
            await read(memory.spans, memory)
        assert caught.value.kind is ErrorKind.CHECKSUM_MISMATCH
        memory.bytes[(span + 1) * nbytes - 1] ^= 1
    assert failures() == before + 3


async def test_empty_spans_have_a_sum_too() -> None:
    empty = checksum(b"")
    await read([(8, Span(8, 0, empty))], None)
    with pytest.raises(EpdError):
        await read([(8, Span(8, 0, empty ^ 1))], None)


async def test_other_work_goes_on_during_the_sums_of_much() -> None:
    memory = Memory(8, 8 << 20)
    reading = asyncio.create_task(read(memory.spans, memory))
    turns = 0
    while not reading.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 3
    assert (await reading).nbytes == 64 << 20
