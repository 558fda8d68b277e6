"""What attention on a device needs to know of one forward: small integers, sent at once.

They are packed into one int32 buffer on the host, copied in one piece, and looked at as
views. With the same `StepShape` the views lie alike, so that a CUDA graph that was
captured over one buffer replays over new contents.

Shapes: T new tokens, B sequences, Z blocks of the longest table, N tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from epd.kv.layout import KvLayout

if TYPE_CHECKING:
    from epd.models.batch import SequenceSlice

TILE_ROWS: Final = 64
"""Rows (new tokens times query heads of one key/value head) of a tile in prefill."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """Everything that a kernel's launch depends on."""

    tokens: int
    sequences: int
    width: int
    """Z."""
    tiles: int
    tile_tokens: int
    """Most tokens of a tile."""
    longest_query: int
    longest_kv: int

    @property
    def sections(self) -> dict[str, tuple[int, ...]]:
        """Views of the buffer, in order."""
        return {
            "write_block": (self.tokens,),
            "write_offset": (self.tokens,),
            "seen": (self.tokens,),
            "tile_first": (self.tiles,),
            "tile_count": (self.tiles,),
            "tile_sequence": (self.tiles,),
            "query_starts": (self.sequences + 1,),
            "kv_starts": (self.sequences + 1,),
            "kv_lengths": (self.sequences,),
            "table": (self.sequences, self.width),
        }

    @property
    def size(self) -> int:
        """int32 numbers of the buffer; each section starts at a multiple of 4 (16 bytes)."""
        return sum(_rounded(prod(shape)) for shape in self.sections.values())


class StepTensors:
    """Views of a buffer of `shape.size` int32 numbers, on any device."""

    def __init__(self, shape: StepShape, buffer: Tensor) -> None:
        assert buffer.dtype is torch.int32
        assert buffer.numel() == shape.size
        self.shape = shape
        self.buffer = buffer
        self._views: dict[str, Tensor] = {}
        start = 0
        for name, size in shape.sections.items():
            self._views[name] = buffer[start : start + prod(size)].view(size)
            start += _rounded(prod(size))

    @property
    def tokens(self) -> int:
        return self.shape.tokens

    def __getitem__(self, name: str) -> Tensor:
        return self._views[name]


def step_shape(
    layout: KvLayout, sequences: Sequence[SequenceSlice], share: int, width: int | None = None
) -> StepShape:
    """Of a forward over `sequences`. `share`: most query heads of a key/value head;
    `width`: of the table, where it must not depend on the sequences."""
    longest_query = max(sequence.query_len for sequence in sequences)
    longest_kv = max(sequence.kv_len for sequence in sequences)
    tile_tokens = 1 if longest_query == 1 else max(1, TILE_ROWS // share)
    least = layout.blocks_for(longest_kv)
    assert width is None or width >= least
    return StepShape(
        tokens=sum(sequence.query_len for sequence in sequences),
        sequences=len(sequences),
        width=width or least,
        tiles=sum(-(-sequence.query_len // tile_tokens) for sequence in sequences),
        tile_tokens=tile_tokens,
        longest_query=longest_query,
        longest_kv=longest_kv if width is None else width * layout.block_tokens,
    )


def pack(
    layout: KvLayout, sequences: Sequence[SequenceSlice], shape: StepShape, *, pinned: bool = False
) -> Tensor:
    """The buffer on the host, [shape.size] int32."""
    size = layout.block_tokens
    buffer = torch.zeros(shape.size, dtype=torch.int32, pin_memory=pinned)
    views = StepTensors(shape, buffer)
    numbers: dict[str, list[int]] = {name: [] for name in shape.sections if name != "table"}
    numbers["query_starts"].append(0)
    numbers["kv_starts"].append(0)
    start = 0
    table = views["table"].numpy()  # wide and mostly empty: row by row
    for index, sequence in enumerate(sequences):
        first, n = sequence.kv_len - sequence.query_len, sequence.query_len
        places = range(first, sequence.kv_len)
        numbers["write_block"] += [sequence.blocks[place // size] for place in places]
        numbers["write_offset"] += [place % size for place in places]
        numbers["seen"] += range(first + 1, sequence.kv_len + 1)
        firsts = range(0, n, shape.tile_tokens)
        numbers["tile_first"] += [start + at for at in firsts]
        numbers["tile_count"] += [min(shape.tile_tokens, n - at) for at in firsts]
        numbers["tile_sequence"] += [index] * len(firsts)
        start += n
        numbers["query_starts"].append(start)
        numbers["kv_starts"].append(numbers["kv_starts"][-1] + sequence.kv_len)
        numbers["kv_lengths"].append(sequence.kv_len)
        used = layout.blocks_for(sequence.kv_len)
        table[index, :used] = sequence.blocks[:used]
    for name, found in numbers.items():
        views[name].numpy()[:] = found
    return buffer


def _rounded(count: int) -> int:
    return -(-count // 4) * 4
