"""A language model of ten lines whose next token depends on every value in its KV cache.

One wrong, stale or foreign block, or one row of another picture, and it says something else.
`Prompt.after` is what it must say.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from epd.jobs import ImageItem
from epd.kv.pool import KvPool
from epd.models.lm import ForwardBatch
from tests.unit.fake_stage import BLOCK, IMAGE, FakeLm
from tests.waiting import LIMIT_S

PICTURES = "ABCDE"
ROW_BYTES = 64 << 10
MOST_ROWS = 12
"""Of one prompt: so large that landing memory of 1 MiB holds little more than that."""


def rows_of(picture: str) -> int:
    """Pictures of two sizes; those of one size differ in their embeddings alone."""
    return 3 if picture in "ABC" else 5


def row_value(picture: str, row: int) -> int:
    """First element of an embedding row."""
    return 100 + 16 * PICTURES.index(picture) + 3 * row


def next_id(values: Sequence[float]) -> int:
    """Order counts, and so does every value."""
    total = sum((place % 11 + 1) * value for place, value in enumerate(values))
    return 15 + int(total) % 80


class KvLm(FakeLm):
    """Reads what it says from the pool."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = replace(self.spec, hidden=ROW_BYTES // 4)

    def forward(self, batch: ForwardBatch, pool: KvPool) -> torch.Tensor:
        assert self.gate.wait(LIMIT_S)
        rows = iter(_embedding_rows(batch))
        at, said = 0, []
        for sequence in batch.sequences:
            images = sequence.image_rows
            for offset in range(sequence.query_len):
                token = int(batch.token_ids[at + offset])
                value = float(token)
                if token == IMAGE and images:
                    value, images = next(rows), images - 1
                place = sequence.kv_len - sequence.query_len + offset
                pool.k(0)[sequence.blocks[place // BLOCK], place % BLOCK] = value
            at += sequence.query_len
            table = [pool.k(0)[b].reshape(BLOCK, -1)[:, 0] for b in sequence.blocks]
            values = torch.cat(table)[: sequence.kv_len].tolist()
            said += [next_id(values)] * sum(
                at - sequence.query_len <= int(i) < at for i in batch.select
            )
        logits = torch.zeros(len(said), self.spec.vocab_size)
        logits[range(len(said)), said] = 1
        return logits


def _embedding_rows(batch: ForwardBatch) -> list[float]:
    if batch.embeddings is None:
        return []
    pieces: Any = batch.embeddings
    joined = torch.cat(list(pieces), 1) if not isinstance(pieces, torch.Tensor) else pieces
    return [float(value) for value in joined[0, :, 0]]


@dataclass(frozen=True)
class Prompt:
    """Words and pictures, in order."""

    parts: tuple[str | int, ...]

    @classmethod
    def draw(cls, chance: random.Random, most: int = 40) -> Prompt:
        """Of few words and pictures, so that many begin alike."""
        parts: list[str | int] = [20] * chance.choice([0, 1, 3, 4, 7, 8])
        rows, length = 0, chance.randrange(4, most - 6)
        while len(parts) + rows < length:
            part = chance.choice([*PICTURES, 21, 22, 23, 24])
            if isinstance(part, str):
                if rows + rows_of(part) > MOST_ROWS:
                    continue
                rows += rows_of(part) - 1
            parts.append(part)
        return cls(tuple(parts))

    @property
    def pictures(self) -> list[str]:
        return [part for part in self.parts if isinstance(part, str)]

    @property
    def ids(self) -> list[int]:
        found: list[int] = []
        for part in self.parts:
            found += [IMAGE] * rows_of(part) if isinstance(part, str) else [part]
        return found

    @property
    def values(self) -> list[float]:
        """What belongs into the cache."""
        found: list[float] = []
        for part in self.parts:
            if isinstance(part, str):
                found += [row_value(part, row) for row in range(rows_of(part))]
            else:
                found.append(part)
        return found

    @property
    def items(self) -> tuple[ImageItem, ...]:
        count = len(self.pictures)
        return tuple(
            ImageItem(index, name.encode() * 32, rows_of(name), (), 8, 8, count)
            for index, name in enumerate(self.pictures)
        )

    def after(self, count: int) -> list[int]:
        """The next ids."""
        values = self.values
        for _ in range(count):
            values.append(next_id(values))
        return [int(value) for value in values[-count:]]
