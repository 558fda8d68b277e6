"""The tensor work of one decode step. Runs in the engine thread only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decode.scheduler import Slot
from decode.ticket import Ticket
from epd.errors import EpdError
from epd.jobs import FinishReason, SampledToken, Stage
from epd.kv.pool import KvPool
from epd.models.lm import DecodeRow, LanguageModel
from epd.runtime.isolate import run_isolated
from epd.sampling.sampler import Sampler


@dataclass(frozen=True, slots=True)
class Made:
    """What a step made of one sequence."""

    slot: Slot
    ticket: Ticket
    fed_id: int
    """The token whose KV was written."""
    result: SampledToken | EpdError
    index: int
    """Of the token among the output's."""
    reason: FinishReason | None
    """If it is the last."""


class Runner:
    """Model, pool and sampler of one worker."""

    def __init__(self, lm: LanguageModel, pool: KvPool, max_context: int) -> None:
        self._lm = lm
        self._pool = pool
        self._max_context = max_context
        self._sampler = Sampler(lm.spec.vocab_size)

    def step(self, work: Sequence[tuple[Slot, Ticket]], begin: Callable[[], None]) -> list[Made]:
        """One forward, and its tokens accepted as output. Sequences that ended meanwhile, or
        whose clients have left, are not in it. `begin`: see `LanguageModel.decode`."""
        work = [(slot, ticket) for slot, ticket in work if not (ticket.ended or ticket.stopped)]
        if not work:
            return []
        fed = [ticket.last_id for _, ticket in work]
        results = run_isolated(
            lambda some: self._run(some, begin),
            work,
            lambda one: one[1].job.request_id,
            Stage.DECODE,
        )
        return [
            self._made(slot, ticket, *what)
            for (slot, ticket), what in zip(work, zip(fed, results, strict=True), strict=True)
        ]

    def _made(
        self, slot: Slot, ticket: Ticket, fed_id: int, result: SampledToken | EpdError
    ) -> Made:
        reason = None
        if isinstance(result, EpdError):
            ticket.ended = True
        else:
            reason = ticket.accept(result.id, self._max_context)
        return Made(slot, ticket, fed_id, result, ticket.sampler.num_output - 1, reason)

    def _run(
        self, work: Sequence[tuple[Slot, Ticket]], begin: Callable[[], None]
    ) -> list[SampledToken | EpdError]:
        """The next token of every sequence; changes nothing but the pool.

        Raises:
            Whatever the model raises: then no sequence has a result.
        """
        rows = [
            DecodeRow(ticket.last_id, slot.kv_len, ticket.job.position_delta, slot.blocks)
            for slot, ticket in work
        ]
        logits, best = self._lm.decode(rows, self._pool, begin)
        return self._sampler.sample(logits, [ticket.sampler for _, ticket in work], best)
