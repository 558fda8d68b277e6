"""The tensor work of one prefill step. Runs in the engine thread only.

Legend: T tokens of the batch, P position rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from epd.errors import EpdError
from epd.jobs import SampledToken
from epd.kv.pool import KvPool
from epd.models.lm import ForwardBatch, LanguageModel, SequenceSlice
from epd.sampling.sampler import Sampler
from epd.transfer.checksum import checksum
from prefill.embeddings import Landing
from prefill.scheduler import Chunk
from prefill.ticket import Ticket


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one chunk came to."""

    sums: tuple[int, ...] = ()
    """Checksums of the blocks sealed now, in order: those that this chunk filled, and
    cached ones whose sum nobody knew."""
    tokens: tuple[SampledToken | EpdError, ...] = ()
    """After the last chunk: the first token of each choice."""


class Runner:
    """Model, pool and sampler of one worker."""

    def __init__(self, lm: LanguageModel, pool: KvPool, landing: Landing) -> None:
        self._lm = lm
        self._pool = pool
        self._landing = landing
        self._sampler = Sampler(lm.spec.vocab_size)

    def run(self, work: Sequence[tuple[Chunk, Ticket]]) -> list[Outcome]:
        """One forward over all chunks; samples where a prompt ends, seals blocks.

        Raises:
            Whatever the model raises: then no chunk has a result.
        """
        logits = self._lm.forward(self._batch(work), self._pool)
        ending = [ticket.samplers for chunk, ticket in work if chunk.last]
        rows = [row for row, samplers in enumerate(ending) for _ in samplers]
        states = [state for samplers in ending for state in samplers]
        tokens = iter(self._sampler.sample(logits[rows], states))
        return [
            Outcome(
                self._seal(chunk, ticket),
                tuple(islice(tokens, len(ticket.samplers))) if chunk.last else (),
            )
            for chunk, ticket in work
        ]

    def _batch(self, work: Sequence[tuple[Chunk, Ticket]]) -> ForwardBatch:
        ids: list[int] = []
        select: list[int] = []
        sequences: list[SequenceSlice] = []
        rows: list[Tensor] = []
        for chunk, ticket in work:
            ids += ticket.job.token_ids[chunk.start : chunk.end]
            pieces = list(self._image_rows(chunk, ticket))
            image_rows = sum(piece.shape[1] for piece in pieces)
            rows += pieces
            sequences.append(SequenceSlice(chunk.tokens, chunk.end, ticket.blocks, image_rows))
            if chunk.last:
                select.append(len(ids) - 1)
        positions = [ticket.positions[:, chunk.start : chunk.end] for chunk, ticket in work]
        return ForwardBatch(
            token_ids=torch.tensor(ids),
            positions=torch.cat(positions, 1),
            sequences=sequences,
            select=torch.tensor(select, dtype=torch.int64),
            embeddings=rows or None,
        )

    def _image_rows(self, chunk: Chunk, ticket: Ticket) -> Iterator[Tensor]:
        """[planes, n, hidden] views, in placeholder order."""
        for span in ticket.spans:
            first = bisect_left(span.positions, chunk.start)
            stop = bisect_left(span.positions, chunk.end)
            if first < stop:
                yield self._landing.rows(ticket.landing[span.index])[:, first:stop]

    def _seal(self, chunk: Chunk, ticket: Ticket) -> tuple[int, ...]:
        """Sums of the blocks that nothing will be written to any more."""
        size = self._pool.layout.block_tokens
        first, stop = len(ticket.sums), chunk.end // size
        if chunk.last and chunk.end % size and ticket.job.decode_follows:
            self._pool.zero_tail(ticket.blocks[stop], chunk.end % size)
            stop += 1
        blocks = ticket.blocks[first:stop]
        self._pool.to_peers(blocks)
        return tuple(checksum(self._pool.block_bytes_view(block)) for block in blocks)
