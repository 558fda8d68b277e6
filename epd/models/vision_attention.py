"""Attention of vision towers, as transformers' models call it: the kernel, or SDPA.

Registered under `NAME` beside SDPA's own mask function, so that masks are built as for
SDPA; whatever has one, or is not bfloat16 on a CPU, is SDPA's.

Shapes: B pictures or tiles, T patches, H heads, D head size.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from epd.models.kernels import build
from epd.models.kernels.dense import DenseKernel

NAME: Final = "epd_vision"

_UNKNOWN: Final = ("position_bias", "softcap", "s_aux", "sliding_window")
"""Arguments that change the result and that the kernel doesn't know."""


def vision_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """[B, T, H, D] of query, key and value [B, H, T, D]: every patch sees all."""
    library = build.load() if _fits(module, query, key, attention_mask, options) else None
    if library is None:
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    kernel = DenseKernel(library, torch.get_num_threads())
    return kernel(query, key, value, scale), None


def _fits(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    options: dict[str, Any],
) -> bool:
    causal = options.get("is_causal", getattr(module, "is_causal", True))
    return (
        query.dtype is torch.bfloat16
        and query.device.type == "cpu"
        and query.shape == key.shape
        and mask is None
        and causal is False
        and all(options.get(name) is None for name in _UNKNOWN)
    )


AttentionInterface.register(NAME, vision_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
