"""All layers of a decoder in one call, for the few rows of a decode step.

Between two calls there is Python, and the lock of its interpreter, which the event loop may
hold; the other threads of a parallel region go to sleep meanwhile. With few rows a layer
takes a millisecond, and all that is a tenth of it.

The model's own forward goes on calling its layers: the first one computes all, the others
give on what they get. Whether nothing else happens between layers is not read from a name:
`LanguageModel` compares the bits of both ways when it is loaded.

Shapes: T rows of a flattened batch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from epd.kv.pool import KvPool
from epd.models.kernels.build import Library
from epd.models.kernels.layer import FusedLayer


class Stack:
    """Hidden states [1, T, hidden] before the first layer to those after the last."""

    def __init__(self, library: Library, layers: Sequence[FusedLayer], threads: int) -> None:
        self._run = library.handle.epd_layers
        front = (c_void_p, c_int64, c_void_p, c_int64)
        tail = (*(c_void_p,) * 9, c_int64, c_int)
        self._run.argtypes, self._run.restype = (*front, *tail), None
        self._threads = threads
        self.count = len(layers)
        self._weights = (c_void_p * self.count)(*(layer.at for layer in layers))
        self.weights_at = ctypes.addressof(self._weights)
        self.d: int = layers[0].struct.d
        self._order = [layer.index for layer in layers]
        self._pool: KvPool | None = None
        self._places: tuple[Any, ...] = ()

    def __call__(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        step: Any,
        kept: int | None = None,
        count: int = -1,
    ) -> Tensor:
        """`kept`: address of the `count` rows that are wanted; all rows: None and -1."""
        y, spare = torch.empty_like(x), torch.empty_like(x)
        self._run(
            *(self._weights, self.count, step.tables.address, x.shape[1], x.data_ptr()),
            *(cos.data_ptr(), sin.data_ptr(), *self.places(step.pool)),
            *(y.data_ptr(), spare.data_ptr(), kept, count, self._threads),
        )
        return y

    def places(self, pool: KvPool) -> tuple[Any, ...]:
        """Where each layer's keys and values are, and how far apart blocks are."""
        if self._pool is not pool:
            keys = [pool.k(index) for index in self._order]
            values = [pool.v(index) for index in self._order]
            self._places = (
                (c_void_p * self.count)(*(k.data_ptr() for k in keys)),
                (c_void_p * self.count)(*(v.data_ptr() for v in values)),
                (c_int64 * self.count)(*(k.stride(0) for k in keys)),
            )
            self._pool = pool
        return self._places


def stack_layers(decoder: Any, library: Library, threads: int) -> Stack | None:
    """Let a decoder run in one call where the step asks for it (`AttentionStep.whole`).
    None if a layer is not fused: nothing has changed then."""
    layers = [layer.forward for layer in decoder.layers]
    if not all(isinstance(layer, FusedLayer) for layer in layers):
        return None
    stack = Stack(library, layers, threads)
    for number, layer in enumerate(layers):
        layer.stack = stack if number == 0 else _give_on
    return stack


def _give_on(x: Tensor, *_: Any) -> Tensor:
    """A layer whose work the first one did."""
    return x
