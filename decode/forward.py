"""The tensor work of one decode step. Runs in the engine thread only.

Legend: T sequences, one token each; P position rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from decode.scheduler import Slot
from decode.ticket import Ticket
from epd.errors import EpdError
from epd.jobs import SampledToken
from epd.kv.pool import KvPool
from epd.models.lm import ForwardBatch, LanguageModel, SequenceSlice
from epd.sampling.sampler import Sampler


class Runner:
    """Model, pool and sampler of one worker."""

    def __init__(self, lm: LanguageModel, pool: KvPool) -> None:
        self._lm = lm
        self._pool = pool
        self._sampler = Sampler(lm.spec.vocab_size)

    def run(self, work: Sequence[tuple[Slot, Ticket]]) -> list[SampledToken | EpdError]:
        """The next token of every sequence; changes nothing but the pool.

        Raises:
            Whatever the model raises: then no sequence has a result.
        """
        positions = [
            self._lm.continuation(slot.kv_len - 1, 1, ticket.job.position_delta)
            for slot, ticket in work
        ]
        batch = ForwardBatch(
            token_ids=torch.tensor([ticket.last_id for _, ticket in work]),
            positions=torch.cat(positions, 1),
            sequences=[SequenceSlice(1, slot.kv_len, slot.blocks) for slot, _ in work],
            select=torch.arange(len(work)),
        )
        logits = self._lm.forward(batch, self._pool)
        return self._sampler.sample(logits, [ticket.sampler for _, ticket in work])
