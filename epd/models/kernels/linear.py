"""Linear layers on packed weights, bfloat16 or int8; activations are bfloat16.

Each output is one chain of operations over the inputs in order, so that a row's bits
don't depend on how many rows there are: no mode is needed for that.

Shapes: m rows, n outputs, k inputs.
"""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_void_p
from typing import Any, Final

import torch
from torch import Tensor, nn

from epd.models.kernels.build import Library
from epd.models.quantize import GROUP, chunks, quantize, release, shared_weights
from epd.pages import untouched

_ALIGN: Final = 64
_PANEL: Final = 32


class LinearKernel:
    """The C functions, and the number of threads that they use."""

    format = 0
    """`Format` of linear.h."""

    def __init__(self, library: Library, threads: int) -> None:
        self.threads = threads
        c = library.handle
        self._bytes = c.epd_linear_packed_bytes
        self._bytes.argtypes, self._bytes.restype = [c_int64, c_int64], c_int64
        self._pack = c.epd_linear_pack
        self._pack.argtypes = [c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int]
        self._read = c.epd_read
        self._read.argtypes, self._read.restype = (c_void_p, c_int64, c_int), c_float
        self.run = c.epd_linear
        rows = (c_void_p, c_int64, c_int64)
        weight, out = (c_void_p, c_void_p, c_int64, c_int64), (c_void_p, c_int64)
        self.run.argtypes = (*rows, *weight, *out, c_int64, c_int)
        self.run.restype = None

    def packed_bytes(self, weight: Tensor) -> int:
        """Bytes of the packed form of [n, k], a multiple of 64."""
        return int(self._bytes(*weight.shape))

    def pack(self, weight: Tensor, out: Tensor) -> None:
        """Write the packed form of a bfloat16 weight into `out`, uint8, 64-aligned."""
        assert weight.dtype is torch.bfloat16
        assert weight.stride(1) == 1
        assert out.numel() == self.packed_bytes(weight)
        assert out.data_ptr() % _ALIGN == 0
        n, k = weight.shape
        self._pack(weight.data_ptr(), weight.stride(0), n, k, out.data_ptr(), self.threads)

    def read(self, memory: Tensor) -> None:
        """Read every byte and do nothing else, with the same threads: what a step that
        uses every weight once can't be faster than (`epd bench stage`)."""
        self._read(memory.data_ptr(), memory.numel() * memory.element_size(), self.threads)


class Int8Kernel(LinearKernel):
    """The same on int8 weights (`epd.models.quantize`): half of the bytes."""

    format = 1

    def __init__(self, library: Library, threads: int) -> None:
        super().__init__(library, threads)
        c = library.handle
        self._bytes = c.epd_int8_packed_bytes
        self._bytes.argtypes, self._bytes.restype = [c_int64, c_int64], c_int64
        self._pack = c.epd_int8_pack
        self._pack.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int]

    def pack(self, weight: Tensor, out: Tensor) -> None:
        """Quantise and write the packed form, a bounded part of the weight at a time."""
        assert out.numel() == self.packed_bytes(weight)
        assert out.data_ptr() % _ALIGN == 0
        n, k = weight.shape
        start = 0
        for rows in chunks(n, k, _PANEL):
            values, scales = quantize(weight[rows])
            assert scales.shape[1] == -(-k // GROUP)
            to = out[start : start + self.packed_bytes(values)]
            where = (values.data_ptr(), scales.data_ptr(), *values.shape, to.data_ptr())
            self._pack(*where, self.threads)
            start += to.numel()


class PackedLinear:
    """`nn.Linear.forward` on a packed weight: [..., k] to [..., n], both bfloat16."""

    def __init__(
        self, kernel: LinearKernel, shape: tuple[int, int], bias: Tensor | None, packed: Tensor
    ) -> None:
        self._run, self._threads, self.format = kernel.run, kernel.threads, kernel.format
        self.n, self.k = shape
        self._packed, self._bias = packed, bias
        self.weight_at = packed.data_ptr()
        self.bias_at = None if bias is None else bias.data_ptr()

    def __call__(self, x: Tensor, *_: Any) -> Tensor:
        n, k = self.n, self.k
        assert x.dtype is torch.bfloat16
        assert x.shape[-1] == k
        if not x.is_contiguous():
            x = x.contiguous()
        y = x.new_empty((*x.shape[:-1], n))
        m = y.numel() // n
        weight, bias = self.weight_at, self.bias_at
        how = (self.format, self._threads)
        self._run(x.data_ptr(), k, m, weight, bias, n, k, y.data_ptr(), n, *how)
        return y


def pack_linears(model: nn.Module, kernel: LinearKernel) -> Tensor:
    """Let every bfloat16 `nn.Linear` of a CPU model run on its packed weight, in place.

    Returns the packed weights: one region of huge pages, in the order of the model,
    uint8. The plain ones are let go of, except where another module uses them (tied
    embeddings).
    """
    linears: list[Any] = [module for module in model.modules() if _can_run(module)]
    sizes = [kernel.packed_bytes(linear.weight) for linear in linears]
    region = untouched(sum(sizes))
    shared = shared_weights(model)
    start = 0
    for linear, size in zip(linears, sizes, strict=True):
        packed = region[start : start + size]
        start += size
        kernel.pack(linear.weight.detach(), packed)
        shape = (linear.out_features, linear.in_features)
        linear.forward = PackedLinear(kernel, shape, linear.bias, packed)
        release(linear, shared)
    return region


def _can_run(module: nn.Module) -> bool:
    if type(module) is not nn.Linear:  # a subclass may compute something else
        return False
    tensors = [module.weight] if module.bias is None else [module.weight, module.bias]
    return all(t.dtype is torch.bfloat16 and t.device.type == "cpu" for t in tensors)
