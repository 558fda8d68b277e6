"""Linear layers of a language model on int8 weights: how they are rounded, and by torch alone.

A weight is an integer of [-127, 127] times a scale for each output and each group of
`GROUP` inputs, the usual symmetric rounding to the nearest. Activations are not rounded.
Where the compiled kernel runs, it takes the same integers and scales
(`epd.models.kernels.linear.Int8Kernel`).

Shapes: m rows, n outputs, k inputs, g groups of inputs.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from epd.models.kernels.memory import give_back

GROUP: Final = 128
"""Inputs that share a scale; the last group may be shorter."""

NAME: Final = "int8"
"""What numbers made with these weights are called where they must not meet others:
numerics id, KV layout. Another rounding needs another name."""

_LARGEST: Final = 127
_CHUNK_ELEMENTS: Final = 1 << 18
"""Weights that are float32 at a time: 1 MiB, which stays in a core's cache."""


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 [n, k], bfloat16 scales [n, g]) of a weight [n, k].

    A scale is the group's largest magnitude over 127, rounded up to bfloat16, so that
    nothing is clipped. A group with a number that is not finite gets a scale that isn't.
    """
    n, k = weight.shape
    groups = F.pad(weight.float(), (0, -k % GROUP)).view(n, -1, GROUP)
    scales = _rounded_up(groups.abs().amax(-1) / _LARGEST)
    inverse = torch.where(scales == 0, 0.0, 1.0 / scales.float())
    values = (groups * inverse[..., None]).round().nan_to_num(0.0).clamp(-_LARGEST, _LARGEST)
    return values.to(torch.int8).view(n, -1)[:, :k].contiguous(), scales


def _rounded_up(x: Tensor) -> Tensor:
    """Non-negative float32 to the next bfloat16 that is not smaller."""
    bits = x.view(torch.int32)
    up = torch.where(x.isfinite(), bits + 0xFFFF, bits)
    return (up & -0x10000).view(torch.float32).bfloat16()


def dequantize(values: Tensor, scales: Tensor) -> Tensor:
    """[n, k] float32: exactly the numbers that integers and scales stand for."""
    each = scales.float().repeat_interleave(GROUP, 1)[:, : values.shape[1]]
    return values.float() * each


def chunks(n: int, k: int, multiple: int = 1) -> list[slice]:
    """Rows of a weight [n, k], a bounded number of elements at a time."""
    rows = max(1, _CHUNK_ELEMENTS // (k * multiple)) * multiple
    return [slice(start, min(n, start + rows)) for start in range(0, n, rows)]


class Int8Linear:
    """`nn.Linear.forward` by torch alone: [..., k] to [..., n], in x's dtype.

    Products and sums in float32, on as many outputs at a time as the bound on
    temporaries allows. `row_tile`: rows of every matrix product (exact mode); None: all.
    """

    def __init__(self, linear: nn.Linear, row_tile: int | None) -> None:
        self.n, self.k = linear.out_features, linear.in_features
        self._row_tile = row_tile
        self._bias = None if linear.bias is None else linear.bias.float()
        weight = linear.weight.detach()
        parts = [quantize(weight[rows]) for rows in chunks(self.n, self.k)]
        self._values, self._scales = (torch.cat(part) for part in zip(*parts, strict=True))

    def __call__(self, x: Tensor, *_: Any) -> Tensor:
        rows = x.reshape(-1, self.k).float()
        out = torch.cat([self._outputs(rows, part) for part in chunks(self.n, self.k)], 1)
        if self._bias is not None:
            out += self._bias
        return out.to(x.dtype).view(*x.shape[:-1], self.n)

    def _outputs(self, rows: Tensor, part: slice) -> Tensor:
        weight = dequantize(self._values[part], self._scales[part])
        if self._row_tile is None:
            return F.linear(rows, weight)
        lacking = -len(rows) % self._row_tile
        tiles = torch.split(F.pad(rows, (0, 0, 0, lacking)), self._row_tile)
        return torch.cat([F.linear(tile, weight) for tile in tiles])[: len(rows)]


def quantize_linears(model: nn.Module, row_tile: int | None) -> None:
    """Let every `nn.Linear` of a CPU model run on int8 weights by torch alone, in place.

    One layer after the other, each plain weight let go of before the next, except where
    another module uses it (tied embeddings).
    """
    shared = shared_weights(model)
    for module in model.modules():
        if type(module) is nn.Linear:  # a subclass may compute something else
            module.forward = Int8Linear(module, row_tile)  # type: ignore[method-assign,assignment]
            release(module, shared)


def shared_weights(model: nn.Module) -> set[int]:
    """Addresses of parameters that more than one module holds."""
    seen: set[int] = set()
    twice: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            (twice if parameter.data_ptr() in seen else seen).add(parameter.data_ptr())
    return twice


def release(linear: nn.Linear, shared: set[int]) -> None:
    """Let go of a weight that is not read any more, unless others share it."""
    weight = linear.weight.detach()
    if weight.data_ptr() not in shared:
        linear.weight = nn.Parameter(weight.to("meta"), requires_grad=False)
        give_back(weight)
