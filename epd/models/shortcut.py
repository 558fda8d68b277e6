"""A decode step in one call, without the model's own Python.

Between embedding and head a model's forward calls its layers one by one, makes masks and
rotary embeddings, and packs results: for plain tokens all that is known beforehand, and
every piece of it is slow, since a step has just streamed all weights through the caches.
Whether embedding, layers, norm and head are all that a model does with them is not read from
a name: `LanguageModel` compares the bits of both ways when it is loaded.

Shapes: T sequences, one new token each; D head size; V vocabulary.
"""

from __future__ import annotations

import ctypes
import logging
from array import array
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from epd.kv.layout import KvLayout
from epd.kv.pool import KvPool
from epd.models.batch import SequenceSlice
from epd.models.kernels.attention import StepTables
from epd.models.kernels.build import Library
from epd.models.kernels.linear import PackedLinear
from epd.models.kernels.norm import FusedNorm
from epd.models.kernels.stack import Stack
from epd.models.spec import ModelSpec

logger = logging.getLogger(__name__)

_LEAST_POSITIONS: Final = 4096


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One sequence's next token: its KV is written at `kv_len - 1`."""

    token_id: int
    kv_len: int
    """Tokens whose keys exist after the step."""
    delta: int
    """Of its rotary position, see `PositionRows.of`."""
    blocks: Sequence[int]
    """Block table; covers at least `kv_len` tokens."""


class Decoded(NamedTuple):
    """What a decode step made."""

    logits: Tensor
    """[T, V], float32, or the same numbers in the model's dtype."""
    best: Sequence[int] | None
    """Where they are known: the lowest of each row's best ids; -1 for a row whose largest
    logit is not finite, or that has one which is no number."""


class _Decoder(ctypes.Structure):
    """`Decoder` of decode.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("layers", "embedding", "norm", "head", "head_bias")),
        *((name, c_int64) for name in ("count", "hidden", "vocabulary", "d", "format")),
        ("epsilon", c_float),
    )


class Shortcut:
    """Embedding, layers, norm and head of a model whose layers run in one call."""

    def __init__(
        self, library: Library, model: Any, stack: Stack, norm: FusedNorm, mrope: bool, threads: int
    ) -> None:
        """Raises AttributeError: the model has not the parts of a plain decoder."""
        self._run = library.handle.epd_decode
        pointers = (c_void_p,) * 9
        self._run.argtypes = (*(c_void_p,) * 2, c_int64, *pointers, c_int)
        self._run.restype = None
        self._stack, self._norm, self._threads = stack, norm, threads
        self._embedding: Tensor = model.get_input_embeddings().weight
        head = model.get_output_embeddings().forward
        plain = isinstance(head, PackedLinear) and self._embedding.dtype is torch.bfloat16
        if not plain or self._embedding.shape[0] < head.n or self._embedding.shape[1] != head.k:
            raise AttributeError("head and embedding are not those of a plain decoder")
        self._head = head
        self._rotary = _Rotary(model.get_decoder().rotary_emb, stack.d, mrope)
        self._struct = _Decoder(
            *(stack.weights_at, self._embedding.data_ptr(), norm.weight.data_ptr()),
            *(head.weight_at, head.bias_at, stack.count, head.k, head.n, stack.d, head.format),
            norm.epsilon,
        )
        self._at = ctypes.addressof(self._struct)

    def takes(self, rows: Sequence[DecodeRow], spec: ModelSpec) -> bool:
        """Whether these are plain tokens at positions that the model has. A peer says the
        delta, and which tokens were generated."""
        return all(
            0 <= row.kv_len - 1 + row.delta < spec.max_positions
            and 0 <= row.token_id < self._head.n
            and row.token_id != spec.image_token_id
            for row in rows
        )

    def __call__(
        self, rows: Sequence[DecodeRow], pool: KvPool, begin: Callable[[], None]
    ) -> Decoded:
        """Writes the new keys and values. `begin` is called when all is prepared, at the last
        moment before the interpreter's lock is let go of."""
        ids = array("q", [row.token_id for row in rows])
        places = array("q", [row.kv_len - 1 + row.delta for row in rows])
        slices = [SequenceSlice(1, row.kv_len, row.blocks) for row in rows]
        tables = StepTables(pool.layout, slices)
        logits = torch.empty((len(rows), self._head.n), dtype=torch.bfloat16)
        best = (c_int64 * len(rows))()
        call = (
            *(self._at, tables.address, len(rows), ids.buffer_info()[0], places.buffer_info()[0]),
            *(*self._rotary.reaching(max(places)), *self._stack.places(pool)),
            *(logits.data_ptr(), ctypes.addressof(best), self._threads),
        )
        begin()
        self._run(*call)
        return Decoded(logits, list(best))


class _Rotary:
    """Rows of a model's rotary embedding by position, made ahead by its own module."""

    def __init__(self, module: Any, d: int, mrope: bool) -> None:
        """Raises AttributeError: its rows are not one for each position, of size `d`."""
        self._module, self._d = module, d
        self._shape = (3, 1, -1) if mrope else (1, -1)
        self._tables: tuple[Tensor, ...] = ()
        self._count = 0
        self._addresses: tuple[int, ...] = ()
        self._make(1)

    def reaching(self, place: int) -> tuple[int, ...]:
        """Addresses of cos and sin [more than `place`, D]."""
        if place >= self._count:
            self._make(place + 1)
        return self._addresses

    def _make(self, least: int) -> None:
        """Twice as many as before: seldom, and some milliseconds each. A piece at a time, since
        the module makes float32 of many times their size on its way."""
        count = max(_LEAST_POSITIONS, 1 << (least - 1).bit_length())
        starts = range(self._count, count, _LEAST_POSITIONS)
        pieces = [self._piece(start, min(count, start + _LEAST_POSITIONS)) for start in starts]
        known = [self._tables] if self._tables else []
        self._tables = tuple(map(torch.cat, zip(*known, *pieces, strict=True)))
        self._addresses = tuple(table.data_ptr() for table in self._tables)
        self._count = count

    def _piece(self, start: int, stop: int) -> tuple[Tensor, ...]:
        """cos and sin of these positions."""
        positions = torch.arange(start, stop).expand(self._shape)
        made = self._module(torch.empty(0, dtype=torch.bfloat16), positions)
        for table in made:
            if table.shape != (1, stop - start, self._d) or table.dtype is not torch.bfloat16:
                raise AttributeError("rotary embeddings are not those of a plain decoder")
        return tuple(table[0] for table in made)


def make_shortcut(
    library: Library, model: Any, stack: Stack, norm: FusedNorm, mrope: bool, threads: int
) -> Shortcut | None:
    """None where the model has not the parts of a plain decoder."""
    try:
        return Shortcut(library, model, stack, norm, mrope, threads)
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
            found = shortcut(some, pools[0], lambda: None).logits
            if not torch.equal(found.float(), forward(some, pools[1])):
                return False
    return torch.equal(pools[0].bytes, pools[1].bytes)
