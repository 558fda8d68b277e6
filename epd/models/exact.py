"""Exact mode: a row's bits depend on that row only, not on batch, chunk or padding.

Two pieces make a transformer row-invariant; norms, rotary embedding and activations
are row by row already.

- Attention: every score, sum and weighted sum is a fixed tree of single-precision
  additions and multiplications, one IEEE operation each, never fused. Over the keys
  the tree pairs neighbours by absolute position, so that masked or missing later keys
  add exact zeros and change nothing. The exponential is built from the same operations
  (torch's own may take another code path for the last elements of a tensor).
- Linear layers: a matrix product may pick another kernel for another number of rows,
  so all of them run on tiles of `ROW_TILE` rows.

See docs/numerics.md for what is promised.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from epd.models.kernels.linear import PackedLinear
from epd.models.quantize import Int8Linear

ROW_TILE: Final = 16
"""Rows of every matrix product; forwards are padded to a multiple of it."""

_TREE_ELEMENTS: Final = 1 << 18
"""Most elements of a product tensor: small enough to stay in a core's cache."""

_LOG2_E: Final = math.log2(math.e)
# ln 2 in two parts; n * _LN2_HIGH is exact for |n| < 2**9 (15 bits).
_LN2_HIGH: Final = 0.693145751953125
_LN2_LOW: Final = 1.428606765330187e-06
_EXP_MIN: Final = -87.0
_TAYLOR: Final = (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)


def make_row_invariant(model: nn.Module) -> None:
    """Let every `nn.Linear` of `model` run on tiles of `ROW_TILE` rows, in place.

    Call it when the weights are on their device. Layers that run on packed or int8
    weights stay as they are: they are row-invariant (`epd.models.kernels.linear`), or
    were given the same tiles (`epd.models.quantize`).
    """
    for module in model.modules():
        done = isinstance(module.forward, (PackedLinear, Int8Linear))
        if isinstance(module, nn.Linear) and not done:
            module.forward = _TiledLinear(module)  # type: ignore[method-assign,assignment]


class _TiledLinear:
    """`nn.Linear.forward` on fixed tiles; padding rows are zero and dropped.

    Inner sizes are padded to whole vectors, too: on odd ones, MKL's small kernels
    treat the rows of one tile differently. No real model has any.
    """

    def __init__(self, linear: nn.Linear) -> None:
        self._bias = linear.bias
        self._lacking = -linear.in_features % ROW_TILE
        self._weight = F.pad(linear.weight, (0, self._lacking)) if self._lacking else linear.weight

    def __call__(self, x: Tensor, *_: Any) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        count = len(rows)
        if self._lacking or count % ROW_TILE:
            rows = F.pad(rows, (0, self._lacking, 0, -count % ROW_TILE))
        tiles = [F.linear(tile, self._weight, self._bias) for tile in torch.split(rows, ROW_TILE)]
        out = tiles[0] if len(tiles) == 1 else torch.cat(tiles)
        return out[:count].view(*x.shape[:-1], len(self._weight))


def exact_attention(
    q_nHD: Tensor,
    k_LGD: Tensor,
    v_LGE: Tensor,
    mask_nL: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """[n, H, E] in q's dtype: softmax(q k) v by the fixed trees above, in float32.

    Row i of the result depends on row i of `q_nHD` and `mask_nL` and on the keys that
    it sees.
    """
    groups = k_LGD.shape[1]
    q_nGRD = (q_nHD.float() * scale).view(len(q_nHD), groups, -1, q_nHD.shape[-1])
    k_DGL = k_LGD.float().permute(2, 1, 0).contiguous()
    v_LGE = v_LGE.float()
    sinks_GR = None if sinks_H is None else sinks_H.float().view(groups, -1)
    widest = max(k_LGD.shape[-1], v_LGE.shape[-1])
    rows = max(1, _TREE_ELEMENTS // (q_nHD.shape[1] * widest * len(k_LGD)))
    parts = []
    for q, mask in zip(torch.split(q_nGRD, rows), torch.split(mask_nL, rows), strict=True):
        weights_LGRn, total_GRn = _weights(q, k_DGL, mask, softcap, sinks_GR)
        out_GRnE = _weighted_sum(weights_LGRn, v_LGE)
        parts.append((out_GRnE / total_GRn[..., None]).permute(2, 0, 1, 3).flatten(1, 2))
    return torch.cat(parts).to(q_nHD.dtype)


def _weights(
    q_nGRD: Tensor,
    k_DGL: Tensor,
    mask_nL: Tensor,
    softcap: float | None,
    sinks_GR: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(exp(score - largest) [L, G, R, n], their sum [G, R, n])."""
    q_DGRn1 = q_nGRD.permute(3, 1, 2, 0).contiguous()[..., None]
    scores_GRnL = _halving_sum(q_DGRn1 * k_DGL[:, :, None, None])
    if softcap is not None:
        scores_GRnL = softcap * _tanh(scores_GRnL / softcap)
    scores_GRnL = scores_GRnL.masked_fill(~mask_nL, float("-inf"))
    largest = scores_GRnL.amax(-1, keepdim=True)
    if sinks_GR is not None:
        largest = torch.maximum(largest, sinks_GR[..., None, None])
    weights = _exp(scores_GRnL - largest).permute(3, 0, 1, 2).contiguous()
    total = _neighbour_sum(weights)
    if sinks_GR is not None:
        total = total + _exp(sinks_GR[..., None] - largest[..., 0])
    return weights, total


def _weighted_sum(weights_LGRn: Tensor, v_LGE: Tensor) -> Tensor:
    """[G, R, n, E]."""
    return _neighbour_sum(weights_LGRn[..., None] * v_LGE[:, :, None, None])


def _halving_sum(x: Tensor) -> Tensor:
    """Sum over the first dimension, of fixed size: second half onto the first."""
    while len(x) > 1:
        half = len(x) // 2
        folded = x[:half] + x[half : 2 * half]
        x = torch.cat([folded, x[2 * half :]]) if len(x) % 2 else folded
    return x[0]


def _neighbour_sum(x: Tensor) -> Tensor:
    """Sum over the first dimension: a binary tree over absolute indices.

    Appending zeros gives the same bits. `+ 0.0` turns a negative zero, which a
    missing partner leaves and an added zero doesn't, into a positive one.
    """
    while len(x) > 1:
        even = len(x) // 2 * 2
        folded = x[0:even:2] + x[1:even:2]
        x = torch.cat([folded, x[even:]]) if len(x) % 2 else folded
    return x[0] + 0.0


def _exp(x: Tensor) -> Tensor:
    """exp for x <= 0 in float32, about 2 units in the last place; 0 below -87."""
    clamped = x.clamp(min=_EXP_MIN)
    n = (clamped * _LOG2_E).round()
    r = (clamped - n * _LN2_HIGH) - n * _LN2_LOW
    p = torch.full_like(r, _TAYLOR[0])
    for coefficient in _TAYLOR[1:]:
        p = p * r + coefficient
    power = ((n.to(torch.int32) + 127) << 23).view(torch.float32)
    return torch.where(x < _EXP_MIN, 0.0, p * power)


def _tanh(x: Tensor) -> Tensor:
    e = _exp(-2.0 * x.abs())
    return torch.copysign((1.0 - e) / (1.0 + e), x)
