"""The tensor work of one decode step. Runs in the engine thread only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from decode.scheduler import Slot
from decode.ticket import Ticket
from epd.errors import EpdError
from epd.jobs import SampledToken
from epd.kv.pool import KvPool
from epd.models.lm import DecodeRow, LanguageModel
from epd.sampling.sampler import Sampler


class Runner:
    """Model, pool and sampler of one worker."""

    def __init__(self, lm: LanguageModel, pool: KvPool) -> None:
        self._lm = lm
        self._pool = pool
        self._sampler = Sampler(lm.spec.vocab_size, lm.best)

    def run(
        self, work: Sequence[tuple[Slot, Ticket]], begin: Callable[[], None] = lambda: None
    ) -> list[SampledToken | EpdError]:
        """The next token of every sequence; changes nothing but the pool. `begin`: see
        `LanguageModel.decode`.

        Raises:
            Whatever the model raises: then no sequence has a result.
        """
        rows = [
            DecodeRow(ticket.last_id, slot.kv_len, ticket.job.position_delta, slot.blocks)
            for slot, ticket in work
        ]
        logits = self._lm.decode(rows, self._pool, begin)
        return self._sampler.sample(logits, [ticket.sampler for _, ticket in work])
