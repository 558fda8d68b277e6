"""One attempt of one request over the three stages; see the diagram in `pipeline`."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from epd.errors import EpdError, ErrorKind
from epd.jobs import FinishReason, Stage
from epd.rpc import convert
from gateway.encoding import Encoding
from gateway.jobs import AttemptJobs
from gateway.progress import Progress, Stages, broken
from gateway.request import PlannedRequest
from gateway.streams import StageFault, StageStream
from protos.epd.v1 import common_pb2, decode_pb2, prefill_pb2

_SETTLE_S = 1.0


class Attempt:
    """Runs the stages once. Owns its streams; `teardown` must follow `run`, however it
    ended, and may run while the next attempt is under way."""

    def __init__(
        self,
        stages: Stages,
        request: PlannedRequest,
        number: int,
        progress: Progress,
        deadline: float,
    ) -> None:
        self._stages = stages
        self._request = request
        self._progress = progress
        self._timeline = progress.timeline
        self._deadline = deadline
        self._jobs = AttemptJobs.draw(request, number, stages.fingerprint, progress.output)
        self._base = len(progress.output)
        self._tasks: asyncio.TaskGroup | None = None
        self._prefill_task: asyncio.Task[None] | None = None
        self._prefill: StageStream | None = None
        self._prefill_done = False
        """It has given its token: it computes and reads no more, it only holds blocks."""
        self._released = False
        """Half-closed: nobody reads its blocks any more."""
        self._encoding = Encoding(stages, self._jobs, progress, deadline, self._on_embedding)
        self._decodes: list[StageStream] = []
        self._decode_task: asyncio.Task[None] | None = None
        self._decode_done = False
        self._kv_fetched = False
        self._position_delta = 0
        self._announced: list[prefill_pb2.KvReady] = []
        self._start: decode_pb2.Start | None = None
        self._reason: FinishReason | None = None
        self._joined_decode = False

    async def run(self) -> FinishReason:
        """Deliver the output's rest and return why it ended.

        Raises:
            StageFault: a stage failed.
            EpdError: no worker, or a peer broke the protocol.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                self._prefill_task = tasks.create_task(self._run_prefill())
        except BaseExceptionGroup as group:
            raise _first(group) from None
        assert self._reason is not None
        return self._reason

    # --- prefill -----------------------------------------------------------------------

    async def _run_prefill(self) -> None:
        self._timeline.begin("admission")
        stream = self._prefill = self._open(Stage.PREFILL)
        stream.send(self._jobs.prefill())
        try:
            while (event := await stream.next()) is not None:
                await self._on_prefill(stream, event)
                if self._reason is not None or self._released:
                    return
        except StageFault:
            if not self._released:
                raise
            return
        if not self._released:
            raise broken(stream, "ended before its part was done")

    async def _on_prefill(self, stream: StageStream, event: prefill_pb2.PrefillEvent) -> None:
        kind = event.WhichOneof("kind")
        if kind == "admitted":
            await self._on_admitted(stream, event.admitted)
        elif kind == "embedding_fetched":
            self._encoding.fetched(event.embedding_fetched)
        elif kind == "kv_ready":
            self._on_kv_ready(event.kv_ready)
        elif kind == "first_token":
            await self._on_first_token(stream, event.first_token)

    async def _on_admitted(self, stream: StageStream, admitted: prefill_pb2.Admitted) -> None:
        self._timeline.end("admission")
        self._timeline.begin("prefill")
        self._position_delta = admitted.position_delta
        for index in admitted.missing_items:
            if index >= len(self._request.items):
                raise broken(stream, f"asks for image {index}")
            self._spawn(self._encoding.run(index))
        await self._progress.accept(admitted.cached_tokens)

    def _on_embedding(self, ready: prefill_pb2.EmbeddingReady) -> None:
        assert self._prefill is not None
        self._prefill.send(prefill_pb2.PrefillRequest(embedding_ready=ready))

    def _on_kv_ready(self, ready: prefill_pb2.KvReady) -> None:
        self._announced.append(ready)
        if self._decode_task is not None:
            self._decodes[-1].send(decode_pb2.DecodeRequest(kv_ready=ready))
            return
        self._timeline.begin("kv transfer")
        # Opened here, so that the blocks announced next find it.
        self._decode_task = self._spawn(self._run_decode(self._open_decode()))

    async def _on_first_token(self, stream: StageStream, first: prefill_pb2.FirstToken) -> None:
        self._timeline.end("prefill")
        token = convert.token_from_proto(first.token)
        reason = convert.finish_from_proto(first.finish_reason)
        if reason is None and first.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED:
            raise broken(stream, f"finish reason {first.finish_reason} is unknown")
        if reason is None and not self._jobs.decode_follows:
            reason = FinishReason.LENGTH
        self._prefill_done = True
        if reason is not None:
            # A decode that reads already is told to stop, and then prefill is released:
            # both in `teardown`.
            if self._decode_task is not None:
                self._decode_task.cancel()
            await self._progress.extend(self._base, [token])
            self._reason = reason
            return
        if self._decode_task is None:
            raise broken(stream, "gave a token but announced no KV")
        self._start = decode_pb2.Start(first_token=first.token, kv_tokens=first.kv_tokens)
        self._decodes[-1].send(decode_pb2.DecodeRequest(start=self._start))
        await self._progress.extend(self._base, [token])
        self._release_prefill()

    def _release_prefill(self) -> None:
        """Once it gave its token and decode has its blocks, in whichever order: they are
        reusable at once, and what becomes of prefill is no concern of this request."""
        assert self._prefill is not None
        if self._prefill_done and self._kv_fetched and not self._released:
            self._released = True
            self._prefill.finish()

    # --- decode ------------------------------------------------------------------------

    def _open_decode(self) -> StageStream:
        """Open a call and tell it all that prefill announced so far."""
        stream = self._open(Stage.DECODE)
        self._decodes.append(stream)
        stream.send(self._jobs.decode(self._position_delta))
        for ready in self._announced:
            stream.send(decode_pb2.DecodeRequest(kv_ready=ready))
        if self._start is not None:
            stream.send(decode_pb2.DecodeRequest(start=self._start))
        return stream

    async def _run_decode(self, stream: StageStream) -> None:
        """Follow decode to its end; while prefill holds the blocks another can take over."""
        while True:
            try:
                return await self._follow_decode(stream)
            except StageFault as fault:
                self.blame(fault)
                avoid = self._progress.avoid[Stage.DECODE]
                others = self._stages.registry.has_other(Stage.DECODE, avoid)
                if self._released or not fault.error.mapping.retryable or not others:
                    raise
            stream = self._open_decode()

    async def _follow_decode(self, stream: StageStream) -> None:
        while (event := await stream.next()) is not None:
            kind = event.WhichOneof("kind")
            if kind == "admitted":
                self._joined_decode = True
            elif kind == "kv_fetched":
                fetched = event.kv_fetched
                self._timeline.end("kv transfer", fetched.transfer_bytes)
                self._timeline.begin("decode")
                self._kv_fetched = True
                self._release_prefill()
            elif kind == "tokens":
                tokens = [convert.token_from_proto(token) for token in event.tokens.tokens]
                await self._progress.extend(event.tokens.first_index, tokens)
            elif kind == "finished":
                return self._on_finished(stream, event.finished)
        raise broken(stream, "ended without finishing")

    def _on_finished(self, stream: StageStream, finished: decode_pb2.Finished) -> None:
        self._timeline.end("decode")
        reason = convert.finish_from_proto(finished.reason)
        if reason is None:
            raise broken(stream, f"finish reason {finished.reason} is unknown")
        if finished.output_tokens != len(self._progress.output):
            raise broken(
                stream,
                f"finished with {finished.output_tokens} tokens, "
                f"{len(self._progress.output)} arrived",
            )
        stream.finish()
        self._decode_done = True
        self._reason = reason
        if self._prefill_task is not None:
            self._prefill_task.cancel()  # it waits for the end of a call that is over

    # --- teardown ----------------------------------------------------------------------

    async def teardown(self, reason: str) -> None:
        """Close every call in promise 2's order: readers, their word, then owners.

        Never raises. After a complete output all calls are half-closed already and
        this only sees them end.
        """
        cancel = common_pb2.Cancel(reason=reason)
        decoded = True
        for decode in self._decodes:
            message = decode_pb2.DecodeRequest(cancel=cancel)
            decoded &= await self._stopped(decode, message, done=self._decode_done)
            decode.finish()
        streams = [*self._decodes, *self._encoding.streams]
        if (prefill := self._prefill) is not None:
            request = prefill_pb2.PrefillRequest(cancel=cancel)
            fetched = await self._stopped(prefill, request, done=self._prefill_done)
            if decoded or self._released:
                prefill.finish()
            else:
                prefill.abort()
            self._encoding.close(clean=fetched)
            streams.append(prefill)
        await asyncio.gather(*(stream.settle(_SETTLE_S) for stream in streams))

    async def _stopped(self, reader: StageStream, cancel: Any, done: bool) -> bool:
        """Whether no read of this reader is under way any more; asks it to stop first."""
        if done or reader.ended:
            return done or not reader.lost
        return await reader.cancel_and_wait(cancel, self._stages.cancel_bound_s)

    # --- common ------------------------------------------------------------------------

    def _open(self, stage: Stage) -> StageStream:
        worker = self._stages.registry.choose(stage, self._progress.avoid[stage])
        return self._stages.open(stage, worker, self._deadline, self._request.request_id)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        assert self._tasks is not None
        return self._tasks.create_task(work)

    @property
    def progressed(self) -> bool:
        """Whether this attempt delivered a token."""
        return len(self._progress.output) > self._base

    def preempted(self, fault: StageFault) -> bool:
        """Decode had taken the request and pushed it out for want of blocks: not a
        failure, it may go on in the same place."""
        crowded = fault.error.kind is ErrorKind.OVERLOADED
        return crowded and fault.stage is Stage.DECODE and self._joined_decode

    def blame(self, fault: StageFault) -> None:
        """Whom later attempts rather avoid. Of a failed read both ends: which one is
        at fault, nobody knows."""
        if self.preempted(fault):
            return
        self._progress.blame(fault)
        if fault.error.kind is ErrorKind.TRANSFER_FAILED and fault.stage is Stage.PREFILL:
            encoders = [stream.worker for stream in self._encoding.streams]
            self._progress.avoid[Stage.ENCODE] += encoders


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The cause: what a stage or a check said, rather than what followed from it."""
    flat: list[BaseException] = []
    for error in group.exceptions:
        flat.append(_first(error) if isinstance(error, BaseExceptionGroup) else error)
    typed = [error for error in flat if isinstance(error, StageFault | EpdError)]
    return (typed or flat)[0]
