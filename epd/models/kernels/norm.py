"""The norm behind a decoder's last layer, by the same code as those inside of its layers."""

from __future__ import annotations

import logging
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import Any, Final

import torch
from torch import Tensor, nn

from epd.models.kernels.build import Library
from epd.models.kernels.parts import epsilon_of

logger = logging.getLogger(__name__)
_TOLERANCE: Final = 0.01
"""Of the largest number: two roundings to bfloat16."""


class FusedNorm:
    """`forward` of an RMSNorm: [..., n] bfloat16."""

    def __init__(self, library: Library, norm: Any, epsilon: float, threads: int) -> None:
        self._run = library.handle.epd_norm
        self._run.argtypes = (*(c_void_p,) * 2, c_float, *(c_int64,) * 2, c_void_p, c_int)
        self._run.restype = None
        self.weight: Tensor = norm.weight
        self.epsilon = epsilon
        self._threads = threads

    def __call__(self, x: Tensor) -> Tensor:
        n = len(self.weight)
        assert x.dtype is torch.bfloat16
        assert x.shape[-1] == n
        x = x.contiguous()
        out = torch.empty_like(x)
        where = (x.data_ptr(), self.weight.data_ptr(), self.epsilon, x.numel() // n, n)
        self._run(*where, out.data_ptr(), self._threads)
        return out


@torch.inference_mode()
def fuse_norm(decoder: nn.Module, library: Library, threads: int) -> FusedNorm | None:
    """Let a decoder's last norm run on the kernel if it is an RMSNorm: by its parts, and by
    what it makes of random rows."""
    norm: Any = getattr(decoder, "norm", None)
    epsilon = epsilon_of(norm)
    parts = list(norm.named_parameters()) if isinstance(norm, nn.Module) else []
    if [name for name, _ in parts] != ["weight"] or epsilon is None:
        return None
    if norm.weight.dtype is not torch.bfloat16 or norm.weight.dim() != 1:
        return None
    fused = FusedNorm(library, norm, epsilon, threads)
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(1, 24, len(norm.weight), generator=generator) * 3).bfloat16()
    wanted = norm(x).float()
    if bool((fused(x).float() - wanted).abs().max() > _TOLERANCE * wanted.abs().max()):
        return None
    norm.forward = fused
    return fused
