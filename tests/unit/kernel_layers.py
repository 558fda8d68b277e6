"""Layers for the kernels: packed ones, and such as no kernel knows."""

from __future__ import annotations

from typing import Any

from torch import nn

from epd.models.kernels.linear import Int8Kernel, LinearKernel, PackedLinear
from epd.pages import untouched


def packed_linear(kernel: LinearKernel | Int8Kernel, linear: nn.Linear) -> PackedLinear:
    packed = untouched(kernel.packed_bytes(linear.weight))
    kernel.pack(linear.weight.detach(), packed)
    return PackedLinear(kernel, (linear.out_features, linear.in_features), linear.bias, packed)


def another_residual(layer: Any) -> None:
    """From now on it adds less of its MLP."""
    original = layer.mlp.forward
    layer.mlp.forward = lambda x: original(x) * 0.9


def another_part(layer: Any) -> None:
    """From now on it has weights that no kernel looks for."""
    layer.extra_norm = nn.LayerNorm(4)
