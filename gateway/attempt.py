"""One attempt of one request over the three stages; see the diagram in `pipeline`."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Coroutine, Sequence
from typing import Any

from epd.errors import ErrorKind
from epd.jobs import Stage
from gateway.ahead import Ahead, settled
from gateway.branch import Branch, FirstOf
from gateway.encoding import Encoding
from gateway.jobs import AttemptJobs
from gateway.progress import Progress, Stages, broken
from gateway.request import PlannedRequest
from gateway.streams import StageFault, StageStream
from gateway.together import Together
from protos.epd.v1 import common_pb2, decode_pb2, prefill_pb2


class Attempt:
    """Runs the stages once. Owns its streams; `teardown` must follow `run`, however it
    ended, and may run while the next attempt is under way."""

    def __init__(
        self,
        stages: Stages,
        request: PlannedRequest,
        number: int,
        group: Sequence[Progress],
        deadline: float,
        ahead: Ahead,
    ) -> None:
        self._stages = stages
        self._request = request
        self._group = group
        self._timeline = group[0].timeline
        self._deadline = deadline
        self._ahead = ahead
        self._beginning = stages.beginning(request)
        self.jobs = AttemptJobs.draw(
            request,
            number,
            stages.fingerprint,
            group[0].output,
            [progress.choice for progress in group],
        )
        self._tasks: Together | None = None
        self._prefill_task: asyncio.Task[None] | None = None
        self._prefill: StageStream | None = None
        self._prefill_done = False
        """It has given its token: it computes and reads no more, it only holds blocks."""
        self.released = False
        """Half-closed: nobody reads its blocks any more."""
        self._encoding = Encoding(stages, self.jobs, group[0], deadline, ahead)
        self.position_delta = 0
        self.announced: list[prefill_pb2.KvReady] = []
        # They know it weakly: nothing of an attempt may outlive it (see `together`).
        self._branches = [Branch(weakref.proxy(self), progress) for progress in group]

    async def run(self) -> None:
        """Deliver the outputs' rest; every `Progress` then has its `reason`.

        Raises:
            StageFault: a stage failed.
            EpdError: no worker, or a peer broke the protocol.
        """
        try:
            async with Together() as tasks:
                self._tasks = tasks
                self._prefill_task = tasks.create_task(self._run_prefill())
        finally:
            self._forget_tasks()
        assert self._all_over

    def _forget_tasks(self) -> None:
        """They are done. Each keeps what it raised, and by that whoever refers to it."""
        self._tasks = self._prefill_task = None
        self._encoding.forget_tasks()
        for branch in self._branches:
            branch.forget_task()

    @property
    def _all_over(self) -> bool:
        return all(progress.reason is not None for progress in self._group)

    def stop(self, choice: int) -> None:
        """The output of one of several choices is over (its `reason` is set)."""
        for branch in self._branches:
            if branch.progress.choice == choice:
                branch.stop()

    # --- prefill -----------------------------------------------------------------------

    async def _run_prefill(self) -> None:
        self._timeline.begin("admission")
        stream = self._prefill = self.open(Stage.PREFILL, self._group[0])
        self._encoding.near = stream.worker
        stream.send(self.jobs.prefill())
        asyncio.get_running_loop().call_soon(self._encoding.expect)
        try:
            while (event := await stream.next()) is not None:
                await self._on_prefill(stream, event)
                if self._all_over or self.released:
                    return
        except StageFault:
            if not self.released:
                raise
            return
        if not self.released:
            raise broken(stream, "ended before its part was done")

    async def _on_prefill(self, stream: StageStream, event: prefill_pb2.PrefillEvent) -> None:
        kind = event.WhichOneof("kind")
        if kind == "admitted":
            await self._on_admitted(stream, event.admitted)
        elif kind == "embedding_fetched":
            self._encoding.fetched(event.embedding_fetched)
        elif kind == "kv_ready":
            self.announced.append(event.kv_ready)
            for branch in self._branches:
                branch.kv_ready(event.kv_ready)
        elif kind == "first_token":
            await self._on_first_token(stream, event.first_token)

    async def _on_admitted(self, stream: StageStream, admitted: prefill_pb2.Admitted) -> None:
        self._timeline.end("admission")
        self._timeline.begin("prefill")
        if not admitted.HasField("position_delta"):
            raise broken(stream, "admitted the request without a position_delta")
        self.position_delta = admitted.position_delta
        for index in admitted.missing_items:
            if index >= len(self._request.items):
                raise broken(stream, f"asks for image {index}")
            self.spawn(self._encoding.run(index, self._on_embedding))
        if not admitted.missing_items and (left := self._ahead.close()):
            self.spawn(settled(left))
        # The request is accepted, not its choices: one word for all of them.
        if not any(progress.accepted for progress in self._group):
            await self._group[0].accept(admitted.cached_tokens)
        for progress in self._group:
            progress.accepted = True

    def _on_embedding(self, ready: prefill_pb2.EmbeddingReady) -> None:
        assert self._prefill is not None
        self._prefill.send(prefill_pb2.PrefillRequest(embedding_ready=ready))

    async def _on_first_token(self, stream: StageStream, first: prefill_pb2.FirstToken) -> None:
        self._timeline.end("prefill")
        if 1 + len(first.others) != len(self._branches):
            raise broken(stream, f"gave {1 + len(first.others)} first tokens")
        self._prefill_done = True
        tokens: list[FirstOf] = [first, *first.others]
        for branch, token in zip(self._branches, tokens, strict=True):
            await branch.first_token(stream, token)
        self.branch_changed()

    def branch_changed(self) -> None:
        """Prefill is released once it gave its tokens and no decode needs its blocks, in
        whichever order: they are reusable at once, and what becomes of prefill is no
        concern of this request."""
        assert self._prefill is not None
        idle = all(branch.fetched or branch.over for branch in self._branches)
        if self._prefill_done and idle and not self.released:
            self.released = True
            if any(branch.lost_reader for branch in self._branches):
                self._prefill.abort()  # one that another took over from may still read
            else:
                self._prefill.finish()
        finished = all(branch.over for branch in self._branches) and self._all_over
        if finished and self._prefill_task not in (None, asyncio.current_task()):
            assert self._prefill_task is not None
            self._prefill_task.cancel()  # it waits for the end of a call that is over

    # --- teardown ----------------------------------------------------------------------

    async def teardown(self, reason: str, damaged: bool = False) -> None:
        """Close every call in this order: readers, their word, then owners. Prefill
        is told if decode found its bytes `damaged`.

        Never raises. After a complete output all calls are half-closed already and
        this only sees them end.
        """
        cancel = common_pb2.Cancel(reason=reason)
        readers = [(branch, stream) for branch in self._branches for stream in branch.streams]
        terminal = await asyncio.gather(
            *(self._quiet(branch, stream, cancel) for branch, stream in readers)
        )
        decodes = [stream for _, stream in readers]
        for decode in decodes:
            decode.finish()
        streams = [*decodes, *self._encoding.streams]
        if (prefill := self._prefill) is not None:
            told = common_pb2.Cancel(reason=reason, damaged=damaged)
            request = prefill_pb2.PrefillRequest(cancel=told)
            done = self._prefill_done and not damaged
            fetched = await self._stopped(prefill, request, done)
            if all(terminal) or self.released:
                prefill.finish()
            else:
                prefill.abort()
            self._encoding.close(clean=fetched)
            streams.append(prefill)
        await settled(streams)

    async def _stopped(self, reader: StageStream, cancel: Any, done: bool) -> bool:
        """Whether no read of this reader is under way any more; asks it to stop first."""
        if done or reader.ended:
            return done or not reader.lost
        return await reader.cancel_and_wait(cancel, self._stages.cancel_bound_s)

    async def _quiet(self, branch: Branch, stream: StageStream, cancel: common_pb2.Cancel) -> bool:
        return branch.reads_no_more(stream) or await self.stop_reading(stream, cancel)

    async def stop_reading(self, stream: StageStream, cancel: common_pb2.Cancel) -> bool:
        """Have a decode call stop; whether no read of it is under way any more."""
        return await self._stopped(stream, decode_pb2.DecodeRequest(cancel=cancel), done=False)

    # --- common ------------------------------------------------------------------------

    def open(self, stage: Stage, progress: Progress) -> StageStream:
        """A call to a worker that this choice doesn't avoid.

        Raises:
            EpdError: there is no worker.
        """
        near = None if self._prefill is None else self._prefill.worker
        avoid = progress.avoid[stage]
        worker = self._stages.registry.choose(stage, avoid, near, self._beginning)
        opened = self._ahead.take(stage, worker)
        return opened or self._stages.open(stage, worker, self._deadline, self._request.request_id)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        assert self._tasks is not None
        return self._tasks.create_task(work)

    def has_other(self, stage: Stage, progress: Progress) -> bool:
        """Whether there is a worker that this choice doesn't avoid."""
        return self._stages.registry.has_other(stage, progress.avoid[stage])

    @property
    def progressed(self) -> bool:
        """Whether this attempt delivered a token."""
        return any(branch.progressed for branch in self._branches)

    def preempted(self, fault: StageFault) -> bool:
        """See `Branch.preempted`."""
        return any(branch.preempted(fault) for branch in self._branches)

    def blame(self, fault: StageFault, branch: Branch | None = None) -> None:
        """Whom later attempts rather avoid. Of a failed read both ends: which one is
        at fault, nobody knows."""
        if self.preempted(fault):
            return
        if fault.error.kind is ErrorKind.CHECKSUM_MISMATCH and fault.stage is Stage.PREFILL:
            self._encoding.doubt()
        for progress in self._group if branch is None else [branch.progress]:
            progress.blame(fault)
            if fault.error.kind is not ErrorKind.TRANSFER_FAILED:
                continue
            if fault.stage is Stage.PREFILL:
                encoders = [stream.worker for stream in self._encoding.streams]
                progress.avoid[Stage.ENCODE] += encoders
            elif fault.stage is Stage.DECODE and self._prefill is not None:
                progress.avoid[Stage.PREFILL].append(self._prefill.worker)
