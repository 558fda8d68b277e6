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
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from epd.errors import EpdError, ErrorKind, without_frames
from epd.jobs import Stage
from epd.rpc.status import internal
from gateway import disclosure
from gateway.ahead import Ahead, settled
from gateway.attempt import Attempt
from gateway.deadline import Deadline
from gateway.progress import Progress, Stages
from gateway.request import Event, PlannedRequest
from gateway.streams import StageFault
from gateway.timeline import Timeline
from gateway.together import Together

_log = logging.getLogger(__name__)
MAX_ATTEMPTS = 3
_BUFFERED_EVENTS = 64
"""Events kept for a client that reads slowly; then no more is taken from decode, where the
tokens of this one answer wait."""
_MOST_TOGETHER = 2048
"""Tokens, with the alternatives to each, that are given to a client at once: all that waits
may be larger than any message may be, and encoding it would hold up everybody else."""
_RETRY_WAIT_S = 1.0
"""How long a retry waits for a worker, if its client has nothing yet and can ask again."""


class Pipeline:
    """Runs requests; keeps the teardowns that outlive them."""

    def __init__(self, stages: Stages) -> None:
        self.stages = stages
        self._background: set[asyncio.Task[None]] = set()
        self.running = 0

    @contextmanager
    def ahead(self, request_id: str, deadline: Deadline) -> Iterator[Ahead]:
        """For calls that are opened while a request is planned."""
        ahead = Ahead(self.stages, deadline.at, request_id)
        try:
            yield ahead
        except BaseException:
            self.give_up(ahead)
            raise

    def give_up(self, ahead: Ahead) -> None:
        """What nobody took of it."""
        if left := ahead.close():
            self.spawn(settled(left))

    def start(
        self, request: PlannedRequest, deadline: Deadline, timeline: Timeline, ahead: Ahead
    ) -> Run:
        """Begin. The caller must `cancel` it.

        Raises:
            EpdError: STAGE_UNAVAILABLE if a stage that is surely needed has no worker.
        """
        needed = [Stage.PREFILL]
        if request.sampling.max_tokens > 1:
            needed.append(Stage.DECODE)
        for stage in needed:
            self.stages.registry.choose(stage)
        return Run(self, request, deadline, timeline, ahead)

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
        self,
        pipeline: Pipeline,
        request: PlannedRequest,
        deadline: Deadline,
        timeline: Timeline,
        ahead: Ahead,
    ) -> None:
        self._ahead = ahead
        self._pipeline = pipeline
        self._request = request
        self._deadline = deadline
        self._events: asyncio.Queue[Event | EpdError] = asyncio.Queue(_BUFFERED_EVENTS)
        self._progresses = [
            Progress(self._events, timeline, choice) for choice in range(request.choices)
        ]
        self._attempts: set[Attempt] = set()
        self._numbers = itertools.count()
        self._fault: EpdError | None = None
        """Taken from the queue, not yet raised."""
        self._reason = "the deadline has passed"
        pipeline.running += 1
        self._task: asyncio.Task[None] | None = asyncio.create_task(self._drive())
        self._task.add_done_callback(self._on_done)

    def _on_done(self, _: asyncio.Task[None]) -> None:
        self._pipeline.running -= 1
        self._task = None  # cancelled, it keeps what refers to this run
        self._pipeline.give_up(self._ahead)

    async def next(self) -> Event:
        """The next event; after the last choice's `Ended` there is none.

        Raises:
            EpdError: the request failed; nothing follows.
        """
        fault, self._fault = self._fault, None
        event = fault or await self._events.get()
        if isinstance(event, EpdError):
            raise event
        return event

    async def ready(self) -> list[Event]:
        """The next event, and those that wait behind it, up to `_MOST_TOGETHER`.

        Raises:
            EpdError: see `next`; events before the fault come first.
        """
        events = [await self.next()]
        weight = events[0].weight
        while weight < _MOST_TOGETHER and not self._events.empty():
            event = self._events.get_nowait()
            if isinstance(event, EpdError):
                self._fault = event
                break
            events.append(event)
            weight += event.weight
        return events

    def stop(self, choice: int) -> None:
        """The output of one of several choices is complete (a stop string); no `Ended`
        follows for it."""
        self._progresses[choice].stop()
        for attempt in self._attempts:
            attempt.stop(choice)

    def cancel(self, reason: str) -> None:
        """Give up what still runs; the teardown goes on in the background."""
        self._reason = reason
        if self._task is not None:
            self._task.cancel()

    async def _drive(self) -> None:
        try:
            async with self._deadline.kept():
                await self._follow(self._progresses, 0)
                return
        except StageFault as fault:
            error = disclosure.told(fault, self._request)
            # Of what is wrong with a request its API's refusal is the one line.
            if error.mapping.http_status != 400:
                extra = {"request": self._request.request_id}
                _log.log(error.log_level, "failed: %s", fault, extra=extra)
            without_frames(fault)
        except EpdError as typed:
            error = typed
            if typed.kind is ErrorKind.INTERNAL:
                _log.error("failed: %s", typed, extra={"request": self._request.request_id})
                error = internal(self._request.request_id)
        except Exception:
            _log.exception("request %s failed", self._request.request_id)
            error = internal(self._request.request_id)
        await self._events.put(without_frames(error))

    async def _follow(self, group: list[Progress], failures: int) -> None:
        """Attempts until these outputs are whole. Choices share an attempt as long as
        none of them has output; then each goes on for itself."""
        while True:
            fault, preempted, progressed = await self._attempt(group)
            group = [progress for progress in group if progress.reason is None]
            if not group:
                return
            assert fault is not None
            # A preempted request that moves on may do so as often as it must.
            moved_on = preempted and progressed
            full = self._finds_full(fault) and not moved_on
            failures += not (fault.handed_back or full or moved_on)
            self._check_retry(fault, failures, group, preempted or full)
            if full:
                await asyncio.sleep(fault.error.retry_after_s or _RETRY_WAIT_S)
            await self._recover()
            if len(group) > 1 and not _can_share(group):
                return await self._part(group, failures)

    async def _part(self, group: list[Progress], failures: int) -> None:
        """If one fails for good, the others are cancelled: there is no half an answer."""
        async with Together() as tasks:
            for progress in group:
                tasks.create_task(self._follow([progress], failures))

    async def _attempt(self, group: list[Progress]) -> tuple[StageFault | None, bool, bool]:
        """Run one. The fault that ended it; whether decode had pushed it out; whether it
        made any tokens."""
        number = next(self._numbers)
        attempt = Attempt(
            self._pipeline.stages, self._request, number, group, self._deadline.at, self._ahead
        )
        self._attempts.add(attempt)
        failure: StageFault | None = None
        preempted = False
        try:
            await attempt.run()
        except StageFault as fault:
            failure = without_frames(fault)
            attempt.blame(fault)
            preempted = attempt.preempted(fault)
            self._reason = f"{fault.stage} failed"
            for progress in group:
                # If the output is whole, only decode's last word was lost.
                progress.reason = progress.reason or progress.ending
        finally:
            self._attempts.discard(attempt)
            self._pipeline.spawn(attempt.teardown(self._reason, _damaged(failure)))
        for progress in group:
            if progress.reason is not None:
                await progress.end()
        return failure, preempted, attempt.progressed

    def _finds_full(self, fault: StageFault) -> bool:
        """Whether there is no room for a request that decode had begun (the first token is
        prefill's): its client has a part of the answer, which is not broken off for that."""
        begun = any(len(progress.output) > 1 for progress in self._progresses)
        return begun and fault.error.kind is ErrorKind.OVERLOADED

    def _check_retry(
        self, fault: StageFault, failures: int, group: list[Progress], may_wait: bool
    ) -> None:
        """Return if another attempt makes sense, else raise the fault. `may_wait`: also at the
        same place, although it is full."""
        if failures >= MAX_ATTEMPTS or not fault.error.mapping.retryable:
            raise fault
        avoid = group[0].avoid[fault.stage]
        crowded = fault.error.kind is ErrorKind.OVERLOADED and not may_wait
        if crowded and not self._pipeline.stages.registry.has_other(fault.stage, avoid):
            raise fault
        extra = {"request": self._request.request_id}
        _log.warning("trying again after failure %d: %s", failures, fault, extra=extra)

    async def _recover(self) -> None:
        """Wait a little for workers: one that restarts is back within a second or two. A client
        that has a part of its answer can't ask for the rest, so that waits for longer; one that
        has none of it is told soon that a stage is gone."""
        needed = {Stage.PREFILL}
        if self._request.items:
            needed.add(Stage.ENCODE)
        if self._request.sampling.max_tokens > 1:
            needed.add(Stage.DECODE)
        stages = self._pipeline.stages
        sent = self._request.streamed and any(progress.output for progress in self._progresses)
        wait_s = max(_RETRY_WAIT_S, stages.config.gateway.recover_s) if sent else _RETRY_WAIT_S
        await stages.registry.until_live(needed, wait_s)


def _damaged(fault: StageFault | None) -> bool:
    """Whether decode found that prefill's bytes are not what their sums say."""
    if fault is None or fault.stage is not Stage.DECODE:
        return False
    return fault.error.kind is ErrorKind.CHECKSUM_MISMATCH


def _can_share(group: list[Progress]) -> bool:
    """Whether one prefill can begin all these outputs."""
    choices = [progress.choice for progress in group]
    consecutive = choices == list(range(choices[0], choices[0] + len(choices)))
    return consecutive and not any(progress.output for progress in group)
