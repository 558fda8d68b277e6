"""Language model, one token at a time: one decode worker without its gRPC.

One request's life:

    submit -> (KvReady)* -> reserve -> DecodeAdmitted -> blocks read and verified
           -> KvFetched, Start -> a token a step -> Finished -> close
              |                     |
              +-- cancel -> ReadsTerminal    +-- preempted: OVERLOADED, to be
                                                 prefilled again

Who owns what: the pool owns all bytes; the scheduler holds each request's blocks,
those of a cached prefix together with others. They are freed when no read, nor its copy
to a device, writes into them and no running step uses them. The prefix cache keeps full
blocks, from when they were read and verified or a step filled them, and holds none.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from decode.forward import Made, Runner
from decode.loading import KvReader
from decode.scheduler import Place, Scheduler, Slot, Step
from decode.ticket import Admitted, Finished, KvFetched, ReadsTerminal, Ticket, TokenMade
from epd.config import Config
from epd.errors import EpdError, ErrorKind, crowded, invalid
from epd.jobs import DecodeJob, FinishReason, SampledToken, Stage
from epd.kv.prefix import BlockChain
from epd.kv.store import KvStore
from epd.models.lm import LanguageModel
from epd.obs import metrics
from epd.rpc.status import internal
from epd.runtime.group import Description
from epd.runtime.isolate import doubtful
from epd.runtime.lm_worker import LmWorker
from epd.runtime.memory import OwnedMemory
from epd.runtime.series import Series
from epd.runtime.steps import EngineThread
from epd.sampling.grammar import Grammars
from epd.sampling.params import validate
from epd.sampling.state import SamplerState
from epd.transfer.contract import Handle, mismatch

logger = logging.getLogger(__name__)


class DecodeWorker(LmWorker[Ticket]):
    """Methods run on the event loop."""

    stage = Stage.DECODE
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
        shared = self._num_blocks < kv.blocks.num_blocks
        self._scheduler = Scheduler(
            kv.blocks,
            kv.prefix,
            self._layout.block_tokens,
            config.decode.max_running,
            config.decode.max_queue,
            self._num_blocks,
        )
        self._runner = Runner(lm, kv.pool, max_context)
        self._series = Series(self.steps, self._runner.step, self._done)
        spec = self.spec
        self._grammars = Grammars(spec.path, spec.vocab_size, spec.eos_token_ids)
        self._reader = KvReader(spec, kv, memory, shared)
        self._next_key = 0

    def warm_up(self) -> None:
        super().warm_up()
        self._lm.prepare_decode(self._kv.pool, self._config.decode.max_running, self._max_context)

    # -- one request --------------------------------------------------------

    async def submit(self, job: DecodeJob) -> Ticket:
        """Check and join a request; `close` the ticket whatever happens then.

        Raises:
            EpdError: a parameter is wrong, the request can't fit even an empty pool,
                or the queue is full.
        """
        validate(job.sampling, self.spec.vocab_size, self._config.limits)
        total = len(job.token_ids)
        left = job.sampling.max_tokens - (total - job.prompt_length)
        if left < 1:
            raise invalid("everything is generated already", "job.sampling.max_tokens")
        prompt, output = job.token_ids[: job.prompt_length], job.token_ids[job.prompt_length :]
        matcher = await self._grammars.compile(job.sampling.grammar, output)
        chain = await asyncio.to_thread(self._chain, job)
        key, self._next_key = self._next_key, self._next_key + 1
        # The last token's own KV is never needed.
        most = min(total + left - 1, self._max_context)
        arrival = job.arrival_ms or time.time() * 1000
        if not job.resumed:
            self._make_room(job, most)
        self._scheduler.admit(key, total, most, arrival, chain.hashes, job.salt, job.resumed)
        ticket = Ticket(key, job, SamplerState(job.sampling, prompt, output, matcher), chain)
        self._tickets[key] = ticket
        return ticket

    def _make_room(self, job: DecodeJob, most: int) -> None:
        if (crowded_out := self._scheduler.make_room(job.salt, most)) is not None:
            self._fail(self._tickets[crowded_out], crowded())

    def _chain(self, job: DecodeJob) -> BlockChain:
        return self._kv.chain(
            job.token_ids,
            job.items,
            image_token_id=self.spec.image_token_id,
            prompt_length=job.prompt_length,
            salt=job.salt,
        )

    def kv_ready(self, ticket: Ticket, first_block: int, handle: Handle, tokens: int) -> None:
        """Blocks can be read; they are, as soon as their places are reserved.

        Raises:
            EpdError: CONTRACT_MISMATCH, or blocks out of order.
        """
        if ticket.stopped:
            return
        if ticket.first is not None:
            raise invalid("came after start", "kv_ready")
        self._reader.announced(ticket, first_block, handle, tokens)
        self._scheduler.announced(ticket.key, ticket.adopts)
        self._admit()  # now, not after the running step: reading overlaps with it

    def begin(self, ticket: Ticket, first: SampledToken, kv_tokens: int) -> None:
        """Start's words: all is announced, this is the first token.

        Raises:
            EpdError: CONTRACT_MISMATCH, it was not all: decode never runs on less.
        """
        if ticket.stopped:
            return
        if ticket.first is not None:
            raise invalid("came twice", "start")
        if not ticket.announced_tokens == kv_tokens == ticket.total:
            announced = f"{ticket.announced_tokens} announced, {kv_tokens} in start"
            raise mismatch("kv_tokens", announced, ticket.total)
        if first.id >= self.spec.vocab_size:
            raise invalid("is not in the vocabulary", "start.first_token.id")
        ticket.first = first
        self._run_when_ready(ticket)

    def _run_when_ready(self, ticket: Ticket) -> None:
        if ticket.first is None or not ticket.fetched or ticket.stopped:
            return
        reason = ticket.accept(ticket.first.id, self._max_context)
        if reason is not None:
            self._finish(ticket, reason)
        else:
            self._scheduler.start(ticket.key)
            self._look_ahead()
            self.steps.poke()

    async def _load(self, ticket: Ticket, place: Place) -> None:
        """Read blocks as they are announced, until all are here."""
        try:
            if ticket.adopts:
                await self._reader.adopt(
                    ticket, place.blocks, lambda blocks: self._scheduler.adopt(ticket.key, blocks)
                )
            else:
                await self._reader.load(
                    ticket,
                    place.blocks,
                    place.cached,
                    lambda at, block: self._replace(ticket, at, block),
                )
        except EpdError as error:
            self._fail(ticket, error)
            return
        except Exception:
            logger.exception("reading KV raised")
            self._fail(ticket, internal(ticket.job.request_id))
            return
        ticket.fetched = True
        ticket.events.put(KvFetched(ticket.transfer_ms, ticket.transfer_bytes))
        self._run_when_ready(ticket)

    def _replace(self, ticket: Ticket, at: int, block: int) -> None:
        self._scheduler.replace(ticket.key, at, block)
        self.steps.poke()  # its own block is free

    def cancel(self, ticket: Ticket) -> None:
        """Stop after the running step; reports ReadsTerminal, the stream's last word."""
        if ticket.stopped:
            return
        self._stop(ticket)
        self._spawn(self._report_terminal(ticket), "reads terminal")

    async def _report_terminal(self, ticket: Ticket) -> None:
        bound = self._config.transfer.read_deadline_s
        clean = await self.memory.engine.drain_reads(ticket.read_key, bound)
        ticket.events.put(ReadsTerminal(clean))
        ticket.events.close()

    def half_close(self, ticket: Ticket) -> None:
        """The client has said all it will.

        Raises:
            EpdError: Start is missing, so nothing can ever run.
        """
        if ticket.first is None and not ticket.stopped:
            raise invalid("half-closed before start", "start")

    def close(self, ticket: Ticket) -> None:
        """The stream has ended: give everything back as soon as nothing uses it."""
        self._stop(ticket)
        ticket.events.close()
        self._tickets.pop(ticket.key, None)

    def _stop(self, ticket: Ticket) -> None:
        """No more steps, no more reads; blocks are freed when the last read (on a device:
        the last copy of one) is over and the running step is done."""
        if ticket.stopped:
            return
        ticket.stopped = True
        loader, ticket.loader = ticket.loader, None  # cancelled, it keeps what knows this ticket
        if loader is not None:
            loader.cancel()
        self._reader.when_settled(ticket.read_key, lambda: self._release(ticket))

    def _release(self, ticket: Ticket) -> None:
        self._scheduler.finish(ticket.key)
        self._look_ahead()
        self.steps.poke()

    def _waits(self, ticket: Ticket) -> bool:
        return ticket.loader is None and not ticket.stopped

    def _fail(self, ticket: Ticket, error: EpdError) -> None:
        ticket.events.close(error)
        self._stop(ticket)

    # -- steps --------------------------------------------------------------

    def _admit(self) -> None:
        for place in self._scheduler.reserve():
            ticket = self._tickets[place.key]
            ticket.queue_ms = ticket.since.ms
            ticket.events.put(Admitted(place.cached * self._layout.block_tokens))
            name = f"load {ticket.job.request_id}"
            ticket.loader = asyncio.create_task(self._load(ticket, place), name=name)

    async def _step(self) -> bool:
        self._admit()
        step = self._scheduler.next_batch()
        for key in step.preempted:
            if key in self._tickets:  # else its stream is over and its last read is not
                self._preempt(self._tickets[key])
        if not step.slots:
            return False
        try:
            self._look_ahead()
            await self._series.run(self._work(step))
        finally:
            self._withdraw()
        return True

    def _work(self, step: Step) -> list[tuple[Slot, Ticket]]:
        return [(slot, self._tickets[slot.key]) for slot in step.slots]

    def _look_ahead(self) -> None:
        """Offer the step behind the running one, with all who run now."""
        self._withdraw()
        step = self._scheduler.look_ahead()
        if step is not None:
            self._series.offer(self._work(step))

    def _withdraw(self) -> None:
        if self._series.withdraw() and self._scheduler.withdraw():
            self.steps.poke()  # a prefill in this process may wait for the blocks

    def _done(self, made: Sequence[Made], ms: float) -> None:
        """A step is over; the one behind it may run already."""
        metrics.TOKENS.labels(self.stage).inc(len(made))
        for one in made:
            self._keep(one)
        if self._scheduler.complete():
            self.steps.poke()  # as in `_withdraw`
        for one in made:
            one.ticket.run_ms += ms
            if not one.ticket.stopped:
                self._apply(one)
        self._admit()
        self._look_ahead()

    def _keep(self, made: Made) -> None:
        """Cache the block that the step filled, if it did, whatever becomes of the request."""
        chain = made.ticket.chain
        if isinstance(made.result, EpdError):
            if doubtful(made.result):
                self._kv.prefix.discard(chain.hashes)  # it may be the reason
            return
        known = len(chain.hashes)
        chain.extend([made.fed_id])
        filled = chain.hashes[known:]
        self._kv.prefix.insert(filled, made.slot.blocks[known : known + len(filled)])

    def _apply(self, made: Made) -> None:
        if isinstance(made.result, EpdError):
            self._fail(made.ticket, made.result)
            return
        made.ticket.events.put(TokenMade(made.index, made.result, made.reason))
        if made.reason is not None:
            self._finish(made.ticket, made.reason)

    def _finish(self, ticket: Ticket, reason: FinishReason) -> None:
        metrics.observe_phases(self.stage, ticket.timing)
        ticket.events.put(Finished(reason, ticket.sampler.num_output, ticket.timing))
        ticket.events.close()
        self._stop(ticket)

    def _preempt(self, ticket: Ticket) -> None:
        metrics.PREEMPTIONS.labels(self.stage).inc()
        logger.info("preempted", extra={"request": ticket.job.request_id})
        message = "preempted: the KV pool is full; prefill again with the generated ids"
        self._fail(ticket, EpdError(ErrorKind.OVERLOADED, message, retry_after_s=0.1))

    # -- the whole worker ---------------------------------------------------

    def describe(self) -> Description:
        return replace(super().describe(), max_queue=self._config.decode.max_queue)

    def state(self) -> Mapping[str, object]:
        return {**super().state(), "max_running": self._config.decode.max_running}

    @property
    def _idle(self) -> bool:
        return super()._idle and not (self.memory.engine.outstanding or self._reader.copying)

    async def shut_down(self) -> None:
        await self.steps.close()
        self._grammars.close()
        await self.memory.close()
