"""Attention of whole sequences, no mask and no cache: vision towers, bfloat16.

Shapes: B pictures or tiles, T patches of each, H heads, D head size.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int64, c_void_p
from itertools import pairwise

import torch
from torch import Tensor

from epd.models.kernels.build import Library


class _Dense(ctypes.Structure):
    """`Dense` of dense.h."""

    _fields_ = (
        *((name, c_void_p) for name in "qkv"),
        *((f"{name}_{by}", c_int64) for name in "qkv" for by in ("token", "head")),
        ("starts", c_void_p),
        *((name, c_int64) for name in ("count", "heads", "d", "e")),
        *((name, c_void_p) for name in ("cos", "sin", "out")),
        ("scale", c_float),
    )


class Starts:
    """First rows of the sequences of a flattened batch, and the end, as kernels take them."""

    def __init__(self, starts: Sequence[int]) -> None:
        assert starts[0] == 0
        assert all(a <= b for a, b in pairwise(starts))
        self._owned = array("q", starts)
        self.address = self._owned.buffer_info()[0]
        self.count = len(starts) - 1
        self.rows = starts[-1]


class DenseKernel:
    """The C function, and the number of threads that it uses."""

    def __init__(self, library: Library, threads: int) -> None:
        self._threads = threads
        self._run = library.handle.epd_dense_attention
        self._run.argtypes, self._run.restype = (c_void_p, c_int), None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """[B, T, H, E]: every patch sees all of its picture.

        query and key [B, H, T, D], value [B, H, T, E], bfloat16; what does not lie
        token by token is copied.
        """
        q, k, v = (_flat(x) for x in (query, key, value))
        assert q.dtype is k.dtype is v.dtype is torch.bfloat16
        assert q.shape == k.shape
        assert scale > 0
        count, heads, tokens, d = query.shape
        e = value.shape[3]
        starts = Starts(range(0, (count + 1) * tokens, tokens))
        out = torch.empty((count, tokens, heads, e), dtype=torch.bfloat16)
        strides = (stride for x in (q, k, v) for stride in x.stride()[:2])
        dense = _Dense(
            *(x.data_ptr() for x in (q, k, v)),
            *strides,
            *(starts.address, count, heads, d, e),
            *(None, None, out.data_ptr(), scale),
        )
        self._run(ctypes.addressof(dense), self._threads)
        return out


def _flat(x_BHTD: Tensor) -> Tensor:
    """[B * T, H, D] of [B, H, T, D], its last dimension dense."""
    x_BTHD = x_BHTD.transpose(1, 2)
    x = x_BTHD.flatten(0, 1)  # a copy only where sequences don't follow each other
    return x if x.stride(2) == 1 else x.contiguous()
