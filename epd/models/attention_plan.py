"""How the torch path of attention goes over one forward: slots, tables, masks, groups.

Sequences with several new tokens are taken one by one; decode rows of similar length are
gathered together.

Shapes: T new tokens of all sequences, n of one; L keys of one sequence (cached and new);
B sequences, Z blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from epd.kv.layout import KvLayout
from epd.kv.pool import KvPool
from epd.models.batch import SequenceSlice

_PADDING_LIMIT: Final = 1.25
"""Decode rows are gathered together while the padded keys stay below this multiple."""


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
class Plan:
    """A forward as the torch path takes it."""

    block_T: Tensor
    offset_T: Tensor
    parts: tuple[Part, ...]
    groups: tuple[Group, ...]


def make_plan(pool: KvPool, sequences: Sequence[SequenceSlice], *, exact: bool) -> Plan:
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
    groups = tuple(_group(pool.layout, members, device) for members in similar(singles))
    where = torch.tensor([blocks, offsets], device=device)
    return Plan(where[0], where[1], tuple(parts), groups)


def similar(
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
