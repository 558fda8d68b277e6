"""Attention over the paged cache, straight from the blocks: bfloat16, causal, windowed.

Shapes: T rows of a flattened batch; H heads, G key/value heads; D, E head sizes.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from epd.models.kernels.build import Library

if TYPE_CHECKING:
    from epd.kv.layout import KvLayout
    from epd.kv.pool import KvPool
    from epd.models.batch import SequenceSlice


class _Step(ctypes.Structure):
    """`Step` of attention.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("seen", "table", "blocks", "slot_block", "slot_offset")),
        *((name, c_int64) for name in ("rows", "writes", "block_tokens")),
    )


class _Layer(ctypes.Structure):
    """`Layer` of attention.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("keys", "values")),
        *((name, c_int64) for name in ("block_stride", "heads", "groups", "d", "e")),
        *((name, c_void_p) for name in ("q", "k", "v")),
        *((f"{name}_{by}", c_int64) for name in "qkv" for by in ("token", "head")),
        ("out", c_void_p),
        ("scale", c_float),
        ("window", c_int64),
    )


class StepTables:
    """What every layer's attention needs to know of one forward, as the kernel takes it."""

    def __init__(self, layout: KvLayout, sequences: Sequence[SequenceSlice]) -> None:
        self.tokens = sum(sequence.query_len for sequence in sequences)
        size = layout.block_tokens
        seen, table, blocks = array("i"), array("i"), array("i")
        slot_block, slot_offset = array("i"), array("i")
        for sequence in sequences:
            first, n = sequence.kv_len - sequence.query_len, sequence.query_len
            seen.extend(range(first + 1, sequence.kv_len + 1))
            table.extend([len(blocks)] * n)
            blocks.extend(sequence.blocks[: layout.blocks_for(sequence.kv_len)])
            slot_block.extend([sequence.blocks[i // size] for i in range(first, sequence.kv_len)])
            slot_offset.extend([i % size for i in range(first, sequence.kv_len)])
        self._owned = (seen, table, blocks, slot_block, slot_offset)
        addresses = [numbers.buffer_info()[0] for numbers in self._owned]
        self.struct = _Step(*addresses, self.tokens, self.tokens, size)
        self.address = ctypes.addressof(self.struct)


class AttentionKernel:
    """The C function, and the number of threads that it uses."""

    def __init__(self, library: Library, threads: int) -> None:
        self._threads = threads
        self._run = library.handle.epd_attention
        self._run.argtypes, self._run.restype = (c_void_p, c_void_p, c_int), None

    def tables(self, pool: KvPool, sequences: Sequence[SequenceSlice]) -> StepTables:
        return StepTables(pool.layout, sequences)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: StepTables,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """[1, T, H, E]; writes the new keys and values to the pool first.

        query [1, H, T, D], key and value [1, G, T, D or E], with the last dimension
        dense; keys and values are the pool's views of this layer. Rows beyond
        `tables.tokens` are zero.
        """
        assert query.dtype is key.dtype is value.dtype is keys.dtype is torch.bfloat16
        assert query.stride(3) == key.stride(3) == value.stride(3) == 1
        _, heads, rows, d = query.shape
        groups, e = value.shape[1], value.shape[3]
        make = torch.empty if rows == tables.tokens else torch.zeros
        out = make((1, rows, heads, e), dtype=torch.bfloat16)
        layer = _Layer(
            *(keys.data_ptr(), values.data_ptr(), keys.stride(0), heads, groups, d, e),
            *(query.data_ptr(), key.data_ptr(), value.data_ptr()),
            *(query.stride(2), query.stride(1), key.stride(2), key.stride(1)),
            *(value.stride(2), value.stride(1), out.data_ptr(), scale, window or 0),
        )
        self._run(tables.address, ctypes.addressof(layer), self._threads)
        return out
