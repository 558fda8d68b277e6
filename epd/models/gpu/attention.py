"""Attention on a CUDA device, behind the same call as the CPU's kernel.

FlashAttention through `torch.nn.attention.varlen` where it takes the pool as it is
(torch 2.12 and later, blocks of a multiple of 256 tokens, 16-bit numbers); else the
Triton kernel; where there is no Triton, `epd.models.attention` gathers and asks SDPA.

Shapes: T new tokens of all sequences; H heads, G key/value heads; D, E head sizes.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch import Tensor

from epd.kv.layout import KvLayout
from epd.models.gpu.tables import StepTensors, pack, step_shape

if TYPE_CHECKING:
    from epd.kv.pool import KvPool
    from epd.models.batch import SequenceSlice

Backend = Literal["varlen", "triton"]

FLASH_PAGE: Final = 256
"""FlashAttention 2's pages hold a multiple of this many tokens."""


def choose(layout: KvLayout, *, pages: bool, triton: bool) -> Backend | None:
    """What fits this cache; None: gather and SDPA.

    `pages`: this torch's `varlen_attn` takes block tables; `triton`: it can be imported.
    """
    flash = (
        pages
        and layout.block_tokens % FLASH_PAGE == 0
        and layout.dtype in ("bfloat16", "float16")
        and all(s.k_dim == s.v_dim <= 256 and s.k_dim % 8 == 0 for s in layout.layers)
    )
    return "varlen" if flash else "triton" if triton else None


def varlen_takes_pages() -> bool:
    """Whether this torch has `varlen_attn` with block tables."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"block_table", "seqused_k", "enable_gqa"} <= set(
        inspect.signature(varlen_attn).parameters
    )


def device_has_flash() -> bool:
    """Whether FlashAttention 2 has kernels for the process's device: Ampere or newer."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


class DeviceAttention:
    """`AttentionKernel`'s call on a device. `share`: most query heads of a key/value head."""

    def __init__(self, backend: Backend, share: int) -> None:
        self.backend = backend
        self.share = share
        self._attend: Callable[..., None] = _flash if backend == "varlen" else _paged()

    def tables(self, pool: KvPool, sequences: Sequence[SequenceSlice]) -> StepTensors:
        """One copy to the device; it doesn't wait for what runs there."""
        shape = step_shape(pool.layout, sequences, self.share)
        buffer = pack(pool.layout, sequences, shape, pinned=pool.device.type == "cuda")
        return StepTensors(shape, buffer.to(pool.device, non_blocking=True))

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: StepTensors,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """[1, T, H, E]; writes the new keys and values to the pool first.

        query [1, H, T, D], key and value [1, G, T, D or E]. Rows beyond `tables.tokens`
        are zero.
        """
        n, rows = tables.tokens, query.shape[2]
        where = (tables["write_block"], tables["write_offset"])
        keys[where] = key[0, :, :n].transpose(0, 1).to(keys.dtype)
        values[where] = value[0, :, :n].transpose(0, 1).to(values.dtype)
        make = torch.empty if rows == n else torch.zeros
        size = (rows, query.shape[1], value.shape[3])
        out = make(size, dtype=query.dtype, device=query.device)
        query_THD = query[0].transpose(0, 1)[:n]
        self._attend(query_THD, keys, values, tables, scale, window, out[:n])
        return out[None]


def _paged() -> Callable[..., None]:
    from epd.models.gpu.paged import attend

    return attend


def _flash(
    query_THD: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: StepTensors,
    scale: float,
    window: int | None,
    out_THE: Tensor,
) -> None:
    from torch.nn.attention.varlen import varlen_attn

    # Left and right of the query's own place, which is not counted.
    sides = (-1 if window is None else window - 1, 0)
    options: dict[str, Any] = {"seqused_k": tables["kv_lengths"], "block_table": tables["table"]}
    out: Any = varlen_attn(
        query_THD,
        keys,
        values,
        tables["query_starts"],
        tables["kv_starts"],
        tables.shape.longest_query,
        tables.shape.longest_kv,
        scale=scale,
        window_size=sides,
        enable_gqa=True,
        **options,
    )
    out_THE.copy_(out)
