"""Forwards of a tiny language model, for tests that compare the ways to compute one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from epd.kv.pool import KvPool
from epd.models.lm import ForwardBatch, LanguageModel, SequenceSlice

TABLES = ([0, 1], [2], [3, 4, 5])
CACHED = (40, 9, 70)


def two_sequences(lm: LanguageModel, select: Sequence[int], rows: int = 40) -> ForwardBatch:
    """Random tokens: all but three are one sequence. They lie in blocks 0 to 2."""
    ids = torch.randint(10, 200, (rows,), generator=torch.Generator().manual_seed(0))
    positions, _ = lm.positions(ids, [], rows)
    sequences = [SequenceSlice(rows - 3, rows - 3, [0, 1]), SequenceSlice(3, 3, [2])]
    return ForwardBatch(ids, positions, sequences, select)


def logits_of(lm: LanguageModel, rows: int = 40) -> Tensor:
    """[rows, V], of such a forward in a pool of its own."""
    return lm.forward(two_sequences(lm, range(rows), rows), KvPool(lm.kv_layout, 3))


def filled_pool(lm: LanguageModel) -> KvPool:
    """Keys and values of `CACHED` random tokens of three sequences, in the blocks of `TABLES`:
    prompts, computed in chunks too large for one call of all layers."""
    pool = KvPool(lm.kv_layout, 6)
    for table, cached in zip(TABLES, CACHED, strict=True):
        ids = torch.randint(10, 200, (cached,), generator=torch.Generator().manual_seed(cached))
        positions, sequence = lm.continuation(0, cached, 0), SequenceSlice(cached, cached, table)
        lm.forward(ForwardBatch(ids, positions, [sequence], []), pool)
    return pool
