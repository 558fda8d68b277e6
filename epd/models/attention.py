"""Attention over the paged cache, as transformers' models call it.

`paged_attention` is registered under `NAME`, for which transformers has no mask
function, so that no mask is built. It takes one flattened batch: the new tokens of
all sequences in a row, without padding. It writes their keys and values to the pool
by slot and reads each sequence's own blocks by table, so that sequences can't see
each other.

Shapes: T new tokens of all sequences, n of one; L keys of one sequence (cached and
new); H heads, G key/value heads, R = H / G query heads of a key/value head; D, E head
sizes of keys and values; B sequences, Z blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

import epd.models.spec  # noqa: F401 - sets transformers' environment before its import
from epd.kv.layout import KvLayout
from epd.kv.pool import KvPool
from epd.models.exact import exact_attention

NAME: Final = "epd_paged"

_PADDING_LIMIT: Final = 1.25
"""Decode rows are gathered together while the padded keys stay below this multiple."""


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """The part of a sequence that one forward computes."""

    query_len: int
    """New tokens."""
    kv_len: int
    """Tokens whose keys exist after this forward: cached and new."""
    blocks: Sequence[int]
    """Block table; covers at least `kv_len` tokens."""
    image_rows: int = 0
    """Prompt placeholders among the new tokens: the embedding rows it consumes. A
    placeholder id that was generated is an ordinary token."""

    def __post_init__(self) -> None:
        assert 0 < self.query_len <= self.kv_len
        assert 0 <= self.image_rows <= self.query_len


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


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence with several new tokens: rows [start, start + n) of the batch."""

    start: int
    n: int
    kv_len: int
    table_Z: Tensor
    masks: dict[int | None, Tensor] = field(default_factory=dict)
    """By sliding window; made once for all layers."""

    def mask(self, window: int | None) -> Tensor:
        """[n, L] bool, True where a query sees a key: causal, within the window."""
        if window not in self.masks:
            device = self.table_Z.device
            q_n = torch.arange(self.kv_len - self.n, self.kv_len, device=device)[:, None]
            k_L = torch.arange(self.kv_len, device=device)[None]
            seen = k_L <= q_n
            self.masks[window] = seen if window is None else seen & (k_L > q_n - window)
        return self.masks[window]


@dataclass(frozen=True, slots=True)
class Group:
    """Decode rows (one new token each) of similar length, gathered together."""

    rows_B: Tensor
    table_BZ: Tensor
    lengths_B: Tensor
    padding: Tensor
    """Indices into [B * Z * block_tokens] of gathered places beyond each length."""
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None, width: int) -> Tensor | None:
        """[B, 1, 1, width] bool, or None where every gathered key is seen."""
        if window not in self.masks:
            k_L = torch.arange(width, device=self.rows_B.device)[None]
            seen = k_L < self.lengths_B[:, None]
            if window is not None:
                seen = seen & (k_L >= self.lengths_B[:, None] - window)
            self.masks[window] = None if bool(seen.all()) else seen[:, None, None]
        return self.masks[window]


@dataclass(frozen=True, slots=True)
class _Plan:
    """A forward as the torch path takes it."""

    block_T: Tensor
    offset_T: Tensor
    parts: tuple[Part, ...]
    groups: tuple[Group, ...]


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
    def plan(self) -> _Plan:
        return _plan(self.pool, self.sequences, exact=self.exact)


def _plan(pool: KvPool, sequences: Sequence[SequenceSlice], *, exact: bool) -> _Plan:
    """Slots, tables and groups of one forward."""
    device, size = pool.device, pool.layout.block_tokens
    blocks: list[int] = []
    offsets: list[int] = []
    parts: list[Part] = []
    singles: list[tuple[int, SequenceSlice]] = []
    start = 0
    for sequence in sequences:
        for place in range(sequence.kv_len - sequence.query_len, sequence.kv_len):
            blocks.append(sequence.blocks[place // size])
            offsets.append(place % size)
        if sequence.query_len == 1 and not exact:
            singles.append((start, sequence))
        else:
            table = list(sequence.blocks[: pool.layout.blocks_for(sequence.kv_len)])
            table_Z = torch.tensor(table, device=device)
            parts.append(Part(start, sequence.query_len, sequence.kv_len, table_Z))
        start += sequence.query_len
    groups = tuple(_group(pool.layout, members, device) for members in _similar(singles))
    where = torch.tensor([blocks, offsets], device=device)
    return _Plan(where[0], where[1], tuple(parts), groups)


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


def _similar(
    singles: list[tuple[int, SequenceSlice]],
) -> list[list[tuple[int, SequenceSlice]]]:
    """Split decode rows so that padding each group to its longest wastes little."""
    groups: list[list[tuple[int, SequenceSlice]]] = []
    total = 0
    for row, sequence in sorted(singles, key=lambda single: -single[1].kv_len):
        if groups:
            members = groups[-1]
            longest = members[0][1].kv_len
            if longest * (len(members) + 1) <= _PADDING_LIMIT * (total + sequence.kv_len) + 64:
                members.append((row, sequence))
                total += sequence.kv_len
                continue
        groups.append([(row, sequence)])
        total = sequence.kv_len
    return groups


def _group(
    layout: KvLayout, members: list[tuple[int, SequenceSlice]], device: torch.device
) -> Group:
    size = layout.block_tokens
    width = max(layout.blocks_for(sequence.kv_len) for _, sequence in members)
    tables, padding = [], []
    for i, (_, sequence) in enumerate(members):
        table = list(sequence.blocks[: layout.blocks_for(sequence.kv_len)])
        tables.append(table + table[:1] * (width - len(table)))
        padding.append(torch.arange(sequence.kv_len, width * size) + i * width * size)
    return Group(
        rows_B=torch.tensor([row for row, _ in members], device=device),
        table_BZ=torch.tensor(tables, device=device),
        lengths_B=torch.tensor([sequence.kv_len for _, sequence in members], device=device),
        padding=torch.cat(padding).to(device),
    )


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
