"""The convolution that cuts a picture into patches, on a packed weight.

Its windows don't overlap, so each is a row of a linear layer; torch's convolution takes four
times as long (docs/kernels.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from epd.models.kernels.linear import LinearKernel, PackedLinear
from epd.pages import untouched


class PackedPatches:
    """`forward` of the convolution: [B, channels, *size] to [B, outputs, *windows]."""

    def __init__(self, kernel: LinearKernel, convolution: Any) -> None:
        weight = convolution.weight.detach().flatten(1)
        packed = untouched(kernel.packed_bytes(weight))
        kernel.pack(weight, packed)
        self._size: tuple[int, ...] = convolution.kernel_size
        self._linear = PackedLinear(kernel, tuple(weight.shape), convolution.bias, packed)

    def __call__(self, x: Tensor) -> Tensor:
        batch, channels, *whole = x.shape
        counts = [length // size for length, size in zip(whole, self._size, strict=True)]
        for axis, (count, size) in enumerate(zip(counts, self._size, strict=True), 2):
            x = x.narrow(axis, 0, count * size)  # what is left over is no window
        cut = [n for pair in zip(counts, self._size, strict=True) for n in pair]
        dims = len(counts)
        windows, inside = range(2, 2 + 2 * dims, 2), range(3, 3 + 2 * dims, 2)
        x = x.reshape(batch, channels, *cut).permute(0, *windows, 1, *inside)
        return self._linear(x.flatten(1 + dims)).movedim(-1, 1)


def pack_patches(model: nn.Module, kernel: LinearKernel) -> int:
    """Let the convolutions of a CPU model whose windows don't overlap run on packed weights;
    how many do. Their plain weights stay: models ask them for dtype and device."""
    found: list[Any] = [module for module in model.modules() if _can_run(module)]
    for convolution in found:
        convolution.forward = PackedPatches(kernel, convolution)
    return len(found)


def _can_run(module: nn.Module) -> bool:
    if type(module) not in (nn.Conv2d, nn.Conv3d):
        return False
    assert isinstance(module, nn.Conv2d | nn.Conv3d)
    plain = module.groups == 1 and set(module.dilation) == {1} and module.padding_mode == "zeros"
    bare = module.padding == "valid" or set(module.padding) == {0}
    tensors = [module.weight] if module.bias is None else [module.weight, module.bias]
    fits = all(t.dtype is torch.bfloat16 and t.device.type == "cpu" for t in tensors)
    return plain and bare and fits and module.kernel_size == module.stride
