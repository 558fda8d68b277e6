"""Language model over prompts: one prefill worker without its gRPC.

One request's life:

    submit -> WAITING --reserve--> Admitted -> (EmbeddingReady -> fetch -> Fetched)*
           -> chunks, KvReady* -> FirstToken -> close(clean)     blocks reusable now
                  |                                close(lost)   announced: quarantine
                  +-- cancel -> running step ends -> ReadsTerminal -> close

Who owns what: the pool and the landing arena own all bytes. A ticket holds its
blocks and landing places from its reservation on (`holdings`); announced blocks are
under the ticket's lease; `_free` gives everything back exactly once, never under a
running step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from epd.config import Config
from epd.errors import EpdError, crowded, invalid
from epd.handoff import embedding_bytes
from epd.jobs import PrefillJob, SampledToken, Stage
from epd.kv.store import KvStore
from epd.models.lm import LanguageModel
from epd.obs import metrics
from epd.rpc.status import internal
from epd.runtime.group import Description
from epd.runtime.isolate import run_isolated
from epd.runtime.lm_worker import LmWorker
from epd.runtime.memory import OwnedMemory
from epd.runtime.pinning import pin
from epd.runtime.steps import EngineThread
from epd.runtime.streams import Stopwatch
from epd.transfer.contract import Handle
from prefill.budget import StepBudget
from prefill.embeddings import Landing
from prefill.forward import Outcome, Runner
from prefill.holdings import Holdings
from prefill.planning import Planner
from prefill.rows import Rows
from prefill.scheduler import Chunk, Scheduler
from prefill.ticket import (
    Admitted,
    ChoiceToken,
    EmbeddingFetched,
    FirstToken,
    ReadsTerminal,
    Ticket,
)

logger = logging.getLogger(__name__)


class PrefillWorker(LmWorker[Ticket]):
    """Methods run on the event loop."""

    stage = Stage.PREFILL
    _scheduler: Scheduler

    def __init__(
        self,
        config: Config,
        lm: LanguageModel,
        memory: OwnedMemory,
        kv: KvStore,
        max_context: int,
        thread: EngineThread | None = None,
    ) -> None:
        super().__init__(config, lm, memory, kv, max_context, thread)
        self._landing = Landing(self.spec, config.prefill, memory, self.steps.poke)
        pin(self._landing.arena.tensor, lm.device)
        self._holdings = Holdings(
            self.spec, kv, self._num_blocks, self._landing, memory, self.steps.poke
        )
        self._runner = Runner(lm, kv.pool, self._landing)
        limits = config.prefill
        self._budget = StepBudget(limits.step_tokens, limits.step_ms, limits.lone_step_ms)
        self._scheduler = Scheduler(
            limits.step_tokens,
            limits.chunk_tokens,
            limits.max_queue,
            max_queue_tokens=limits.max_queue_tokens,
            overlap=limits.overlap,
        )
        self._planner = Planner(config, lm, kv, self._num_blocks, self._landing)

    # -- one request --------------------------------------------------------

    async def submit(self, job: PrefillJob) -> Ticket:
        """Check and queue a request; `close` the ticket whatever happens then.

        Raises:
            EpdError: a parameter is wrong, the request can't fit even an idle worker,
                the queue is full, or lost readers hold the pool.
        """
        self.memory.check_quarantine()
        ticket = await self._planner.plan(job)
        if not job.resumed:
            for key in self._scheduler.make_room(job.salt, ticket.total):
                self._fail(self._tickets[key], crowded())
        what = (ticket.key, ticket.total, ticket.spans)
        self._scheduler.admit(*what, client=job.salt, resumed=job.resumed)
        self._tickets[ticket.key] = ticket
        self._admit()  # now, not after the running step: encoding overlaps with it
        self.steps.poke()
        return ticket

    def embedding_ready(self, ticket: Ticket, index: int, handle: Handle) -> None:
        """Start reading one image's rows; reports EmbeddingFetched.

        Raises:
            EpdError: no such image, it was announced before, or nothing is reserved.
        """
        if ticket.cancelled:
            return
        if not ticket.admitted:
            raise invalid("came before Admitted", "embedding_ready")
        if index not in ticket.missing:
            raise invalid(f"image {index} is not missing", "embedding_ready.index")
        ticket.missing = tuple(i for i in ticket.missing if i != index)
        ticket.fetches[index] = asyncio.create_task(
            self._fetch(ticket, index, handle), name=f"fetch {ticket.job.request_id}[{index}]"
        )

    async def _fetch(self, ticket: Ticket, index: int, handle: Handle) -> None:
        item, rows = ticket.job.items[index], ticket.landing[index]
        watch = Stopwatch()
        try:
            stats = await self._landing.fetch(ticket.read_key, item, ticket.job.nonce, rows, handle)
        except EpdError as error:
            self._fail(ticket, error)
            return
        except Exception:
            logger.exception("reading an embedding raised")
            self._fail(ticket, internal(ticket.job.request_id))
            return
        ticket.transfer_ms += watch.ms
        ticket.transfer_bytes += stats.nbytes
        self._rows_ready(ticket, rows)
        ticket.events.put(EmbeddingFetched(index, watch.ms, stats.nbytes))
        self.steps.poke()

    def _rows_ready(self, ticket: Ticket, rows: Rows) -> None:
        """Let the chunks run that hold an image with these rows.

        Not before the request's own announcement, though another may have read them: the
        gateway would still be waiting for an encoder when the request is done.
        """
        for index, place in ticket.landing.items():
            if place is rows:
                self._scheduler.item_ready(ticket.key, index)

    def cancel(self, ticket: Ticket, *, damaged: bool = False) -> None:
        """Stop after the running step; reports ReadsTerminal. `damaged`: its reader found
        other bytes than were announced, so they are given to nobody else."""
        if damaged:
            self._holdings.damaged(ticket)
        if ticket.cancelled or ticket.closed:
            return
        self._stop(ticket)
        self._spawn(self._report_terminal(ticket), "reads terminal")

    async def _report_terminal(self, ticket: Ticket) -> None:
        bound = self._config.transfer.read_deadline_s
        clean = await self.memory.engine.drain_reads(ticket.read_key, bound)
        while ticket.in_step:
            await asyncio.sleep(0.001)
        self._tell_last(ticket, ReadsTerminal(clean))

    def half_close(self, ticket: Ticket) -> None:
        """The client has said all it will: a release, once it was told the last event.

        Raises:
            EpdError: images are missing, which nobody can announce now.
        """
        ticket.half_closed = True
        if ticket.told_last:
            ticket.events.close()
        elif ticket.missing and not ticket.cancelled:
            raise _half_closed(ticket)

    def close(self, ticket: Ticket, *, clean: bool) -> None:
        """The stream has ended; `clean` if its readers are done with all blocks.

        Blocks that were never announced are free at once, announced ones at once
        after a clean end, else quarantined; all of them after the running step.
        """
        self._stop(ticket)
        ticket.closed = True
        ticket.events.close()
        ticket.lost = not clean
        if not ticket.in_step:
            self._free(ticket)

    def _stop(self, ticket: Ticket) -> None:
        """No more steps, no more reads."""
        ticket.cancelled = True
        self._scheduler.abort(ticket.key)
        for fetch in ticket.fetches.values():
            fetch.cancel()
        ticket.fetches.clear()  # cancelled, they keep what knows this ticket

    def _waits(self, ticket: Ticket) -> bool:
        return not (ticket.admitted or ticket.cancelled or ticket.closed)

    def _fail(self, ticket: Ticket, error: EpdError) -> None:
        self._stop(ticket)
        ticket.events.close(error)

    def _free(self, ticket: Ticket) -> None:
        """Give back everything. Called once, when closed and in no step."""
        del self._tickets[ticket.key]
        self._holdings.release_landing(ticket)
        self._holdings.release_blocks(ticket)
        self.steps.poke()

    # -- steps --------------------------------------------------------------

    def _admit(self) -> None:
        for key in self._scheduler.reserve(lambda key: self._holdings.reserve(self._tickets[key])):
            ticket = self._tickets[key]
            ticket.admitted = True
            ticket.queue_ms = ticket.since.ms
            ticket.events.put(Admitted(ticket.cached_tokens, ticket.missing, ticket.delta))
            for rows in {rows for rows in ticket.landing.values() if rows.ready}:
                self._rows_ready(ticket, rows)
            if ticket.half_closed and ticket.missing:
                self._fail(ticket, _half_closed(ticket))

    @property
    def _alone(self) -> bool:
        """Whether a step holds up nobody: one request is here, and no answer runs. Pictures
        that are encoded in this process are that request's: it was told what it lacks."""
        requests = self._scheduler.running + self._scheduler.waiting
        elsewhere = self.steps.contended
        return requests < 2 and not self.steps.busy(Stage.DECODE) and not elsewhere

    async def _step(self) -> bool:
        self._admit()
        chunks = self._scheduler.next_batch(self._budget.tokens(alone=self._alone))
        if not chunks:
            return False
        work = [(chunk, self._tickets[chunk.key]) for chunk in chunks]
        for chunk, ticket in work:
            ticket.in_step = True
            self._announce(ticket, chunk.start)  # a cached prefix, before its first step
        watch = Stopwatch()
        outcomes = await self._run(work)
        self._budget.observe(sum(chunk.tokens for chunk in chunks), self.steps.last_ms)
        for (chunk, ticket), outcome in zip(work, outcomes, strict=True):
            ticket.in_step = False
            ticket.run_ms += watch.ms
            self._scheduler.complete(chunk)
            self._apply(chunk, ticket, outcome)
        return True

    async def _run(self, work: list[tuple[Chunk, Ticket]]) -> list[Outcome | EpdError]:
        tokens = sum(chunk.tokens for chunk, _ in work)
        metrics.TOKENS.labels(self.stage).inc(tokens)
        return await self.steps.run(
            lambda: run_isolated(
                self._runner.run, work, lambda one: one[1].job.request_id, self.stage
            ),
            tokens,
        )

    def _apply(self, chunk: Chunk, ticket: Ticket, outcome: Outcome | EpdError) -> None:
        if isinstance(outcome, Outcome):
            self._holdings.keep(chunk, ticket, outcome)
        if ticket.closed:
            self._free(ticket)
        elif ticket.cancelled:
            return
        elif isinstance(outcome, EpdError):
            self._fail(ticket, outcome)
        else:
            self._report(chunk, ticket, outcome)

    def _announce(self, ticket: Ticket, computed: int) -> None:
        if computed < ticket.total and not self._config.prefill.overlap:
            return
        ready = self._holdings.announce(ticket, computed)
        if ready is not None:
            ticket.events.put(ready)

    def _report(self, chunk: Chunk, ticket: Ticket, outcome: Outcome) -> None:
        tokens = [token for token in outcome.tokens if isinstance(token, SampledToken)]
        for fault in outcome.tokens:
            if isinstance(fault, EpdError):
                self._fail(ticket, fault)
                return
        self._announce(ticket, chunk.end)
        if tokens:
            self._first_token(ticket, tokens)

    def _first_token(self, ticket: Ticket, tokens: Sequence[SampledToken]) -> None:
        context_full = ticket.total + 1 >= self._max_context
        first, *others = (
            ChoiceToken(token, state.accept(token.id, context_full=context_full))
            for token, state in zip(tokens, ticket.samplers, strict=True)
        )
        self._holdings.release_landing(ticket)
        if not ticket.job.decode_follows:  # nobody will read them
            self._holdings.release_blocks(ticket)
        metrics.observe_phases(self.stage, ticket.timing)
        self._tell_last(
            ticket,
            FirstToken(first.token, first.finish, ticket.total, ticket.timing, tuple(others)),
        )

    def _tell_last(self, ticket: Ticket, event: FirstToken | ReadsTerminal) -> None:
        ticket.told_last = True
        ticket.events.put(event)
        if ticket.half_closed:
            ticket.events.close()

    # -- the whole worker ---------------------------------------------------

    def describe(self) -> Description:
        # Output as well: a request that decode pushes out, or loses, is prefilled again with
        # all that it has made by then.
        pool_tokens = self._num_blocks * self._layout.block_tokens
        return replace(
            super().describe(),
            max_context=min(self._max_context, pool_tokens),
            max_rows=self._landing.arena.nbytes // embedding_bytes(self.spec, 1),
            max_queue=self._config.prefill.max_queue,
        )

    def state(self) -> Mapping[str, object]:
        queued = self._scheduler.queued_tokens
        return {
            **super().state(),
            **self._landing.state(),
            "queued_tokens": queued,
            "backlog_ms": self._budget.ms(queued),
            "step_budget": self._budget.tokens(alone=self._alone),
        }

    def check_integrity(self) -> None:
        super().check_integrity()
        self._landing.check_integrity()
        self.memory.leases.check_integrity()

    async def shut_down(self) -> None:
        await self.steps.close()
        self._planner.close()
        await self.memory.close()


def _half_closed(ticket: Ticket) -> EpdError:
    return invalid(f"half-closed without images {ticket.missing}", "embedding_ready")
