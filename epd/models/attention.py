"""Attention over the paged cache, as transformers' models call it.

`paged_attention` is registered under `NAME`, for which transformers has no mask
function, so that no mask is built. It takes one flattened batch: the new tokens of
all sequences in a row, without padding. It writes their keys and values to the pool
by slot and reads each sequence's own blocks by table, so that sequences can't see
each other.

Shapes: T new tokens of all sequences, n of one; L keys of one sequence (cached and
new); H heads, G key/value heads, R = H / G query heads of a key/value head; D, E head
sizes of keys and values; B sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from epd.kv.pool import KvPool
from epd.models.attention_plan import Group, Part, Plan, make_plan
from epd.models.batch import SequenceSlice
from epd.models.exact import exact_attention

NAME: Final = "epd_paged"


class Kernel(Protocol):
    """Attention by compiled code: a CPU's, a GPU's."""

    def tables(self, pool: KvPool, sequences: Sequence[SequenceSlice]) -> Any:
        """What its calls need to know of one forward, the same for all layers."""
        ...

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Any,
        scale: float,
        window: int | None,
        /,
    ) -> Tensor:
        """[1, T, H, E]; writes the new keys and values to the pool first."""
        ...


@dataclass(frozen=True)  # no slots: cached properties
class AttentionStep:
    """What every layer's attention needs to know of one flattened forward."""

    pool: KvPool
    sequences: Sequence[SequenceSlice]
    """In batch order."""
    exact: bool
    kernel: Kernel | None = None
    kept: Tensor | None = None
    """Rows [N] int64 whose result is wanted of the last layer, which may compute no others;
    None: all."""
    whole: bool = False
    """Nothing happens between the layers: they may run in one call."""

    @cached_property
    def tokens(self) -> int:
        """Real tokens; rows of the batch beyond them are padding (exact mode)."""
        return sum(sequence.query_len for sequence in self.sequences)

    @cached_property
    def tables(self) -> Any:
        assert self.kernel is not None
        return self.kernel.tables(self.pool, self.sequences)

    @cached_property
    def plan(self) -> Plan:
        return make_plan(self.pool, self.sequences, exact=self.exact)


def plan_step(
    pool: KvPool,
    sequences: Sequence[SequenceSlice],
    *,
    exact: bool,
    kernel: Kernel | None = None,
    kept: Tensor | None = None,
    whole: bool = False,
) -> AttentionStep:
    """One forward over `sequences`, in batch order; `kept`, `whole`: see `AttentionStep`."""
    size = pool.layout.block_tokens
    for sequence in sequences:
        assert len(sequence.blocks) * size >= sequence.kv_len, "block table too short"
    return AttentionStep(pool, sequences, exact, kernel, kept, whole)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    step: AttentionStep | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """One layer. query [1, H, T, D], key [1, G, T, D], value [1, G, T, E].

    Returns [1, T, H, E]. `step` comes as a keyword through the model's forward.
    """
    assert step is not None, "this model's forward does not pass keywords to attention"
    assert attention_mask is None, "a mask was built; it would be ignored"
    assert query.shape[0] == 1
    layer: int = module.layer_idx  # type: ignore[assignment]
    keys, values = step.pool.k(layer), step.pool.v(layer)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = _Options(scale, sliding_window, softcap, s_aux)
    if step.kernel is not None and options.plain:
        window = sliding_window
        out = step.kernel(query, key, value, keys, values, step.tables, scale, window)
        return out, None
    _write(keys, key, step)
    _write(values, value, step)
    return _attend_all(query, keys, values, step, options)[None], None


def _attend_all(
    query: Tensor, keys: Tensor, values: Tensor, step: AttentionStep, options: _Options
) -> Tensor:
    """[T, H, E], by torch."""
    query_THD = query[0].transpose(0, 1)
    out_THE = query.new_zeros(query.shape[2], query.shape[1], values.shape[-1])
    for part in step.plan.parts:
        rows = slice(part.start, part.start + part.n)
        attend = _attend_exactly if step.exact else _attend
        out_THE[rows] = attend(query_THD[rows], keys, values, part, options)
    for group in step.plan.groups:
        out_THE[group.rows_B] = _attend_group(query_THD, keys, values, group, options)
    return out_THE


@dataclass(frozen=True, slots=True)
class _Options:
    scale: float
    window: int | None
    softcap: float | None
    sinks_H: Tensor | None

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.sinks_H is None


def _write(cache: Tensor, new: Tensor, step: AttentionStep) -> None:
    new_TGD = new[0].transpose(0, 1)[: step.tokens]
    cache[step.plan.block_T, step.plan.offset_T] = new_TGD.to(cache.dtype)


def _read(cache: Tensor, part: Part) -> Tensor:
    """[L, G, D], the sequence's own keys or values in token order."""
    return _gather(cache, part.table_Z).flatten(0, 1)[: part.kv_len]


def _gather(cache: Tensor, table_Z: Tensor) -> Tensor:
    """[Z, block_tokens, G, D], a copy. Whole blocks at a time: ten times as fast as
    indexing with the table, which copies number by number."""
    return cache.flatten(1).index_select(0, table_Z).view(-1, *cache.shape[1:])


def _attend(q_nHD: Tensor, keys: Tensor, values: Tensor, part: Part, o: _Options) -> Tensor:
    """[n, H, E]."""
    q = q_nHD.transpose(0, 1)[None]
    k = _read(keys, part).transpose(0, 1)[None]
    v = _read(values, part).transpose(0, 1)[None]
    mask_nL = part.mask(o.window)
    if o.plain:
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask_nL[None, None], scale=o.scale, enable_gqa=True
        )
    else:
        out = _softmax_attention(q, k, v, mask_nL[None, None, None], o)
    return out[0].transpose(0, 1)


def _attend_group(
    query_THD: Tensor, keys: Tensor, values: Tensor, group: Group, o: _Options
) -> Tensor:
    """[B, H, E]. The query heads of a key/value head are its rows: keys aren't repeated."""
    heads = keys.shape[2]
    q_BHD = query_THD[group.rows_B]
    q_BGRD = q_BHD.view(len(q_BHD), heads, -1, q_BHD.shape[-1])
    k_BGLD, v_BGLE = _read_group(keys, group), _read_group(values, group)
    mask = group.mask(o.window, k_BGLD.shape[2])
    if o.plain:
        out = F.scaled_dot_product_attention(q_BGRD, k_BGLD, v_BGLE, attn_mask=mask, scale=o.scale)
        return out.flatten(1, 2)
    wide = None if mask is None else mask[:, :, None]
    out = _softmax_attention(q_BGRD.flatten(1, 2)[:, :, None], k_BGLD, v_BGLE, wide, o)
    return out[:, :, 0]


def _read_group(cache: Tensor, group: Group) -> Tensor:
    """[B, G, L, D]; places beyond a sequence's length are zero.

    They may hold anything, NaN of a failed request included, which a mask does not stop.
    """
    gathered = _gather(cache, group.table_BZ.flatten())
    gathered.flatten(0, 1).index_fill_(0, group.padding, 0)
    return gathered.view(len(group.rows_B), -1, *cache.shape[2:]).transpose(1, 2)


def _softmax_attention(
    q_BHnD: Tensor, k_BGLD: Tensor, v_BGLE: Tensor, mask: Tensor | None, o: _Options
) -> Tensor:
    """[B, H, n, E], with softcap (Gemma) and sinks (gpt-oss), which SDPA lacks."""
    groups = k_BGLD.shape[1]
    q_BGRnD = q_BHnD.reshape(len(q_BHnD), groups, -1, *q_BHnD.shape[2:])
    scores = (q_BGRnD @ k_BGLD[:, :, None].transpose(-1, -2)).float() * o.scale
    if o.softcap is not None:
        scores = o.softcap * torch.tanh(scores / o.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if o.sinks_H is not None:
        sinks = o.sinks_H.float().view(groups, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : k_BGLD.shape[2]].to(v_BGLE.dtype)
    out: Tensor = weights @ v_BGLE[:, :, None]
    return out.flatten(1, 2)


def _attend_exactly(q_nHD: Tensor, keys: Tensor, values: Tensor, part: Part, o: _Options) -> Tensor:
    return exact_attention(
        q_nHD,
        _read(keys, part),
        _read(values, part),
        part.mask(o.window),
        scale=o.scale,
        softcap=o.softcap,
        sinks_H=o.sinks_H,
    )


AttentionInterface.register(NAME, paged_attention)
