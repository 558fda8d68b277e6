"""A decode step without the model's own Python around its layers.

Between embedding and head a model's forward calls its layers one by one, makes masks and
rotary embeddings, and packs results: a millisecond and a half in which the kernels wait. For
plain tokens all that is known beforehand. Whether this is all that a model does with them is
not read from a name: `LanguageModel` compares the bits of both ways when it is loaded.

Shapes: T sequences, one new token each; D head size; V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from epd.kv.layout import KvLayout
from epd.kv.pool import KvPool
from epd.models.attention import Kernel, SequenceSlice, plan_step
from epd.models.kernels.stack import Stack

logger = logging.getLogger(__name__)

_LEAST_POSITIONS: Final = 4096


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One sequence's next token: its KV is written at `kv_len - 1`."""

    token_id: int
    kv_len: int
    """Tokens whose keys exist after the step."""
    delta: int
    """Of its rotary position, see `LanguageModel.positions`."""
    blocks: Sequence[int]
    """Block table; covers at least `kv_len` tokens."""


class Shortcut:
    """Embedding, layers, norm and head of a model whose layers run in one call."""

    def __init__(self, model: Any, stack: Stack, kernel: Kernel, mrope: bool, tile: int) -> None:
        """`tile`: rows are padded to a multiple of it, with placeholders of id 0."""
        decoder = model.get_decoder()
        self._embed, self._norm = model.get_input_embeddings(), decoder.norm
        self._head = model.get_output_embeddings()
        self._rotary = _Rotary(decoder.rotary_emb, self._embed.weight.dtype, mrope)
        self._stack, self._kernel, self._tile = stack, kernel, tile

    def __call__(
        self, rows: Sequence[DecodeRow], pool: KvPool, begin: Callable[[], None]
    ) -> Tensor:
        """Logits [T, V] in the model's dtype; writes the new keys and values. `begin` is
        called when all is prepared and the layers come next."""
        padding = [0] * (-len(rows) % self._tile)
        ids = torch.tensor([[*(row.token_id for row in rows), *padding]])
        places = [*(row.kv_len - 1 + row.delta for row in rows), *padding]
        slices = [SequenceSlice(1, row.kv_len, row.blocks) for row in rows]
        step = plan_step(pool, slices, exact=False, kernel=self._kernel, whole=True)
        x, (cos, sin) = self._embed(ids), self._rotary(places)
        x = self._norm(self._stack(x, cos, sin, step, begin=begin))
        logits: Tensor = self._head(x[:, : len(rows)])[0]
        return logits


def make_shortcut(
    model: Any, stack: Stack, kernel: Kernel, mrope: bool, tile: int
) -> Shortcut | None:
    """None where the model has not the parts of a plain decoder."""
    try:
        return Shortcut(model, stack, kernel, mrope, tile)
    except AttributeError as error:
        logger.info("decode steps go by the model's own forward: %s", error)
        return None


Decode = Callable[[Sequence[DecodeRow], KvPool], Tensor]


@torch.inference_mode()
def agree(shortcut: Shortcut, forward: Decode, layout: KvLayout, ids: Sequence[int]) -> bool:
    """Whether both give the same logits and leave the same keys and values, bit by bit, for
    steps of three sequences and of one. Each has one block, in all places of its table."""
    pools = KvPool(layout, len(ids)), KvPool(layout, len(ids))
    for at in (1, _LEAST_POSITIONS + 1):
        tables = [[block] * layout.blocks_for(at) for block in range(len(ids))]
        rows = [DecodeRow(token, at, 0, table) for token, table in zip(ids, tables, strict=True)]
        for some in (rows, rows[:1]):
            found = shortcut(some, pools[0], lambda: None)
            if not torch.equal(found.float(), forward(some, pools[1])):
                return False
    return torch.equal(pools[0].bytes, pools[1].bytes)


class _Rotary:
    """Rows of a model's rotary embedding by position, made ahead by its own module."""

    def __init__(self, module: Any, dtype: torch.dtype, mrope: bool) -> None:
        self._module, self._like = module, torch.empty(0, dtype=dtype)
        self._shape = (3, 1, -1) if mrope else (1, -1)
        self._tables: tuple[Tensor, ...] = ()

    def __call__(self, places: Sequence[int]) -> tuple[Tensor, Tensor]:
        """cos and sin [1, T, D]."""
        if not self._tables or max(places) >= len(self._tables[0]):
            self._make(max(places) + 1)
        at = torch.tensor(places)
        cos, sin = (table.index_select(0, at)[None] for table in self._tables)
        return cos, sin

    def _make(self, least: int) -> None:
        """Twice as many as before: seldom, and some milliseconds each."""
        count = max(_LEAST_POSITIONS, 1 << (least - 1).bit_length())
        positions = torch.arange(count).expand(self._shape)
        self._tables = tuple(table[0].contiguous() for table in self._module(self._like, positions))
