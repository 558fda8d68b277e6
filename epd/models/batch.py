"""What one forward is given: new tokens of many sequences, one after the other, no padding.

Shapes: T new tokens of all sequences; P position rows (1, or 4 with mRoPE: text, time,
height, width); R image rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


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


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One flattened forward: chunks of prompts and single tokens, mixed as they come."""

    token_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[P, T] int64."""
    sequences: Sequence[SequenceSlice]
    """In batch order; their `query_len` add up to T."""
    select: Tensor | Sequence[int]
    """Rows of the batch whose logits are wanted."""
    embeddings: Tensor | Sequence[Tensor] | None = None
    """[planes, R, hidden], or pieces to be joined along R: the rows of the prompt
    placeholders in this batch, in batch order. R is the sum of `image_rows`."""
