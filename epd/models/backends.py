"""What a language model runs on: the shape of its cache, kernels that fit, names of them."""

from __future__ import annotations

from typing import Any

import torch

from epd.errors import invalid
from epd.kv.layout import KvLayout, LayerShape
from epd.models.gpu.attention import (
    DeviceAttention,
    choose,
    device_has_flash,
    has_triton,
    varlen_takes_pages,
)


def kv_layout(text_config: Any, dtype: str, block_tokens: int, weights: str) -> KvLayout:
    heads = getattr(text_config, "num_key_value_heads", None) or text_config.num_attention_heads
    dim = getattr(text_config, "head_dim", None)
    dim = dim or text_config.hidden_size // text_config.num_attention_heads
    layers = (LayerShape(heads, dim, dim),) * text_config.num_hidden_layers
    return KvLayout(block_tokens, dtype, layers, weights)


def usable_device(name: str | torch.device) -> torch.device:
    """The device, tried out before anything is loaded.

    Raises:
        EpdError: there is none of that name here, or it is not the first: in each thread
            torch and Triton take that one, whatever a tensor says.
    """
    try:
        device = torch.device(name)
        if device.index:
            raise RuntimeError("it must be the process's only one (CUDA_VISIBLE_DEVICES)")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise invalid(
            f"model.device: {str(name)!r} can't be used: {reason}", "model.device"
        ) from error
    return device


def device_attention(layout: KvLayout, heads: int) -> DeviceAttention | None:
    pages = varlen_takes_pages() and device_has_flash()
    backend = choose(layout, pages=pages, triton=has_triton())
    share = heads // min(layer.heads for layer in layout.layers)
    return None if backend is None else DeviceAttention(backend, share)


def isa(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    isa = torch.backends.cpu.get_cpu_capability()
    flags = {
        "bf16": torch.cpu._is_avx512_bf16_supported(),
        "amx": torch.cpu._is_amx_tile_supported(),
    }
    return "+".join([isa, *[name for name, there in flags.items() if there]])
