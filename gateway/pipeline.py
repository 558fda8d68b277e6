"""The sequence of one request over encode, prefill and decode.

PLANNED
   │ Prefill.Run(job)
   v                        Encode.Run, for each missing image, at the same time
ADMITTING ──Admitted──> PREFILLING <──────────────────────────────┐
                          │  │  ^                                 │
                          │  │  │ EmbeddingFetched: half-close    │
                          │  │  └── EmbeddingReady <── ItemReady ─┘
                          │  └ first KvReady ──> Decode.Run(job, KvReady...)
                          │ FirstToken
        it ends, or       │
        max_tokens = 1    v
FINISHED <──────────── STARTED ── Start ──> KvFetched: half-close prefill
    ^                                           │
    └────────── Finished ── Tokens... <── DECODING

Any state but FINISHED ── fault, deadline, client gone ──> TEARDOWN:
    Decode Cancel ─ ReadsTerminal ─> Prefill Cancel ─ ReadsTerminal ─>
    half-close prefill ─> half-close encoders   (a cut instead of a half-close
    where a reader's word is missing: the owner quarantines)

TEARDOWN of a fault that may pass ──> PLANNED again (attempt + 1) with
    prompt + output so far: nothing is delivered twice, nothing is lost.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Coroutine
from typing import Any

from epd.errors import EpdError, ErrorKind
from epd.jobs import FinishReason, Stage
from gateway.attempt import Attempt
from gateway.progress import Progress, Stages
from gateway.request import Ended, Event, PlannedRequest, finished_by
from gateway.streams import StageFault
from gateway.timeline import Timeline

_log = logging.getLogger(__name__)
MAX_ATTEMPTS = 3
_BUFFERED_EVENTS = 64
"""Events kept for a client that reads slowly; then decode is held back."""
_RETRY_WAIT_S = 1.0
"""How long a retry waits for a worker: two heartbeats, by default."""


class Pipeline:
    """Runs requests; keeps the teardowns that outlive them."""

    def __init__(self, stages: Stages) -> None:
        self.stages = stages
        self._background: set[asyncio.Task[None]] = set()
        self.running = 0

    def start(self, request: PlannedRequest, deadline: float, timeline: Timeline) -> Run:
        """Begin. `deadline` is on the event loop's clock. The caller must `cancel` it.

        Raises:
            EpdError: STAGE_UNAVAILABLE if a stage that is surely needed has no worker.
        """
        needed = [Stage.PREFILL]
        if request.sampling.max_tokens > 1:
            needed.append(Stage.DECODE)
        for stage in needed:
            self.stages.registry.choose(stage)
        return Run(self, request, deadline, timeline)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something that outlives the request that began it."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    @property
    def teardowns(self) -> int:
        return len(self._background)

    async def drain(self) -> None:
        """Wait for every teardown."""
        while self._background:
            await asyncio.wait(set(self._background))


class Run:
    """One running request: take its events, then `cancel`."""

    def __init__(
        self, pipeline: Pipeline, request: PlannedRequest, deadline: float, timeline: Timeline
    ) -> None:
        self._pipeline = pipeline
        self._request = request
        self._deadline = deadline
        self._events: asyncio.Queue[Event | EpdError] = asyncio.Queue(_BUFFERED_EVENTS)
        self._progress = Progress(self._events.put, timeline)
        self._reason = "the deadline has passed"
        pipeline.running += 1
        self._task = asyncio.create_task(self._drive())
        self._task.add_done_callback(self._on_done)

    def _on_done(self, _: asyncio.Task[None]) -> None:
        self._pipeline.running -= 1

    async def next(self) -> Event:
        """The next event; after `Ended` there is none.

        Raises:
            EpdError: the request failed; nothing follows.
        """
        event = await self._events.get()
        if isinstance(event, EpdError):
            raise event
        return event

    def cancel(self, reason: str) -> None:
        """Give up what still runs; the teardown goes on in the background."""
        self._reason = reason
        self._task.cancel()

    async def _drive(self) -> None:
        try:
            async with asyncio.timeout_at(self._deadline):
                await self._attempts()
                return
        except TimeoutError:
            error = EpdError(ErrorKind.DEADLINE_EXCEEDED, "the request's deadline has passed")
        except StageFault as fault:
            error = fault.error
        except EpdError as typed:
            error = typed
        except Exception:
            _log.exception("request %s failed", self._request.request_id)
            error = EpdError(
                ErrorKind.INTERNAL,
                f"internal error; see the log of request {self._request.request_id}",
            )
        await self._events.put(error)

    async def _attempts(self) -> None:
        params = self._request.sampling
        failures = 0
        for number in itertools.count():
            attempt = Attempt(
                self._pipeline.stages, self._request, number, self._progress, self._deadline
            )
            try:
                reason: FinishReason | None = await attempt.run()
            except StageFault as fault:
                attempt.blame(fault)
                preempted = attempt.preempted(fault)
                # A preempted request that moves on may do so as often as it must.
                failures += not (preempted and attempt.progressed)
                # If the output is whole, only decode's last word was lost.
                reason = finished_by(self._progress.output, params)
                if reason is None:
                    self._check_retry(fault, failures, preempted)
                self._reason = f"{fault.stage} failed"
            finally:
                self._pipeline.spawn(attempt.teardown(self._reason))
            if reason is not None:
                await self._events.put(Ended(reason))
                return
            await self._recover()

    def _check_retry(self, fault: StageFault, failures: int, preempted: bool) -> None:
        """Return if another attempt makes sense, else raise the fault."""
        if failures >= MAX_ATTEMPTS or not fault.error.mapping.retryable:
            raise fault
        avoid = self._progress.avoid[fault.stage]
        crowded = fault.error.kind is ErrorKind.OVERLOADED and not preempted
        if crowded and not self._pipeline.stages.registry.has_other(fault.stage, avoid):
            raise fault
        extra = {"request": self._request.request_id}
        _log.warning("trying again after failure %d: %s", failures, fault, extra=extra)

    async def _recover(self) -> None:
        """Wait a little for workers: one that restarts is back within a second or two."""
        needed = {Stage.PREFILL}
        if self._request.items:
            needed.add(Stage.ENCODE)
        if self._request.sampling.max_tokens > 1:
            needed.add(Stage.DECODE)
        await self._pipeline.stages.registry.until_live(needed, _RETRY_WAIT_S)
