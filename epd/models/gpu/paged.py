"""Paged attention as a Triton kernel: any block size; bfloat16, float16, float32.

A program computes one key/value head of one *tile*: a few neighbouring new tokens of one
sequence with all their query heads, so that keys are read once for all of them. It walks
over the sequence's keys by block table with an online softmax (Milakov and Gimelshein
2018; Dao et al. 2022). What a row adds, and in what order, goes by the absolute place of
its keys: those that it doesn't see add exact zeros.

Long contexts of few sequences leave a GPU idle, since a tile's keys are not split over
programs; FlashAttention does that (`epd.models.gpu.attention`).

Triton's interpreter runs it on CPUs: tests/unit/test_gpu_attention.py.
"""

# mypy: ignore-errors
# Triton's language has no types, and reads `tl.constexpr` where annotations are strings.

import triton
import triton.language as tl
from torch import Tensor

from epd.models.gpu.tables import StepTensors

_KEYS = 64
"""Keys of one turn of the loop."""


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: StepTensors,
    scale: float,
    window: int | None,
    out: Tensor,
) -> None:
    """query [T, H, D] and out [T, H, E], strided by token and head; keys, values: a layer's
    views of the pool [blocks, block_tokens, G, D or E]."""
    heads, d = query.shape[1:]
    groups, e = values.shape[2:]
    share = heads // groups
    rows = triton.next_power_of_2(max(16, tables.shape.tile_tokens * share))
    _attend[(tables.shape.tiles, groups)](
        *(query, keys, values, out),
        *(tables[name] for name in ("seen", "tile_first", "tile_count", "tile_sequence", "table")),
        *(scale, window or 0, query.stride(0), query.stride(1)),
        *(keys.stride(0), keys.stride(1), values.stride(0), values.stride(1)),
        *(out.stride(0), out.stride(1), tables.shape.width),
        SHARE=share,
        BLOCK=keys.shape[1],
        D=d,
        E=e,
        D_WIDE=max(16, triton.next_power_of_2(d)),
        E_WIDE=max(16, triton.next_power_of_2(e)),
        ROWS=rows,
        KEYS=_KEYS,
    )


@triton.jit
def _attend(
    q,
    keys,
    values,
    out,
    seen,
    tile_first,
    tile_count,
    tile_sequence,
    table,
    scale,
    window,
    q_token,
    q_head,
    k_block,
    k_token,
    v_block,
    v_token,
    out_token,
    out_head,
    width,
    SHARE: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    D_WIDE: tl.constexpr,
    E_WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    tile, group = tl.program_id(0), tl.program_id(1)
    row, key = tl.arange(0, ROWS), tl.arange(0, KEYS)
    d, e = tl.arange(0, D_WIDE), tl.arange(0, E_WIDE)
    live = row < tl.load(tile_count + tile) * SHARE
    token = (tl.load(tile_first + tile) + row // SHARE).to(tl.int64)
    head = group * SHARE + row % SHARE
    sees = tl.load(seen + token, mask=live, other=0)
    end = tl.max(sees, 0)
    # Without a window every key from 0 on is seen.
    lowest = tl.where(window > 0, tl.maximum(sees - window, 0), 0)
    begin = tl.min(tl.where(live, lowest, end), 0) // KEYS * KEYS
    blocks = table + tl.load(tile_sequence + tile).to(tl.int64) * width

    x = tl.load(
        q + (token * q_token + head * q_head)[:, None] + d[None, :],
        mask=live[:, None] & (d < D)[None, :],
        other=0.0,
    )
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mix = tl.zeros([ROWS, E_WIDE], tl.float32)
    for start in range(begin, end, KEYS):
        place = start + key
        there = place < end
        block = tl.load(blocks + place // BLOCK, mask=there, other=0).to(tl.int64)
        offset = place % BLOCK
        k = tl.load(
            keys + (block * k_block + offset * k_token + group * D)[None, :] + d[:, None],
            mask=there[None, :] & (d < D)[:, None],
            other=0.0,
        )
        score = tl.dot(x, k, input_precision="ieee") * scale
        visible = (place[None, :] < sees[:, None]) & (place[None, :] >= lowest[:, None])
        score = tl.where(visible, score, float("-inf"))
        larger = tl.maximum(largest, tl.max(score, 1))
        base = tl.where(larger == float("-inf"), 0.0, larger)  # no key seen yet
        weight = tl.exp(score - base[:, None])
        fade = tl.exp(largest - base)
        v = tl.load(
            values + (block * v_block + offset * v_token + group * E)[:, None] + e[None, :],
            mask=there[:, None] & (e < E)[None, :],
            other=0.0,
        )
        mix = mix * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        total = total * fade + tl.sum(weight, 1)
        largest = larger
    result = mix / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out + (token * out_token + head * out_head)[:, None] + e[None, :],
        result.to(out.dtype.element_ty),
        mask=live[:, None] & (e < E)[None, :],
    )
