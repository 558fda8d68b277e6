"""The first forward of a language model."""

from __future__ import annotations

import torch

from epd.kv.pool import KvPool
from epd.models.lm import ForwardBatch, LanguageModel, SequenceSlice


def warm_up(lm: LanguageModel, pool: KvPool) -> None:
    """One forward before anybody waits: pages in the weights, builds kernels. Block 0 is free
    then, and cleared again."""
    tokens = pool.layout.block_tokens
    ordinary = 0 if lm.spec.image_token_id != 0 else 1
    batch = ForwardBatch(
        token_ids=torch.full((tokens,), ordinary),
        positions=lm.continuation(0, tokens, 0),
        sequences=[SequenceSlice(tokens, tokens, [0])],
        select=torch.tensor([tokens - 1]),
    )
    lm.forward(batch, pool)
    pool.zero_tail(0, 0)
