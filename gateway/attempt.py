"""One attempt of one request over the three stages; see the diagram in `pipeline`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from epd.config import Config
from epd.errors import EpdError, ErrorKind
from epd.jobs import FinishReason, SampledToken, Stage
from epd.rpc import convert
from gateway.jobs import AttemptJobs
from gateway.request import Accepted, Event, NewTokens, PlannedRequest
from gateway.streams import Connections, StageFault, StageStream
from gateway.timeline import Timeline
from gateway.workers import Registry, Worker
from protos.epd.v1 import common_pb2, decode_pb2, encode_pb2, prefill_pb2

_ENCODE_TRIES = 3
_SETTLE_S = 1.0
_IMAGE_FAULTS = frozenset({ErrorKind.INVALID_IMAGE, ErrorKind.IMAGE_TOO_LARGE})
_DEADLINE_SLACK_S = 1.0
"""The gateway's own clock ends a request; gRPC's deadline comes this much later, so
that an orderly teardown fits before it."""


@dataclass(frozen=True, slots=True)
class Stages:
    """What attempts share: who serves, how to reach them, under which limits."""

    registry: Registry
    connections: Connections
    config: Config
    fingerprint: str

    @property
    def cancel_bound_s(self) -> float:
        return self.config.gateway.cancel_bound_s


class Progress:
    """What survives an attempt: the output so far, and whom to avoid."""

    def __init__(self, deliver: Callable[[Event], Awaitable[None]], timeline: Timeline) -> None:
        self.output: list[SampledToken] = []
        self.accepted = False
        self.avoid: dict[Stage, list[Worker]] = {stage: [] for stage in Stage}
        self.timeline = timeline
        self._deliver = deliver

    async def accept(self, cached_tokens: int) -> None:
        if not self.accepted:
            self.accepted = True
            await self._deliver(Accepted(cached_tokens))

    async def extend(self, first_index: int, tokens: list[SampledToken]) -> None:
        """Add tokens to the output: a repeated one is dropped, a gap is a fault."""
        known = len(self.output) - first_index
        if known < 0:
            raise EpdError(ErrorKind.INTERNAL, f"tokens are missing before index {first_index}")
        fresh = tokens[known:]
        if fresh:
            self.output.extend(fresh)
            await self._deliver(NewTokens(tuple(fresh)))


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
        self._prefill: StageStream | None = None
        self._prefill_done = False
        """It has given its token: it computes and reads no more, it only holds blocks."""
        self._released = False
        """Half-closed: nobody reads its blocks any more."""
        self._encoders: dict[int, list[StageStream]] = {}
        self._fetched: set[int] = set()
        self._leased: set[StageStream] = set()
        """Encoders that announced an embedding; the others have nothing to lose."""
        self._decodes: list[StageStream] = []
        self._decode_task: asyncio.Task[None] | None = None
        self._decode_done = False
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
                tasks.create_task(self._run_prefill())
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
                await self._on_prefill(event)
                if self._reason is not None:
                    return
        except StageFault:
            if not self._released:
                raise
            return  # its part was done already
        if not self._released:
            raise self._broken(stream, "ended before its part was done")

    async def _on_prefill(self, event: prefill_pb2.PrefillEvent) -> None:
        kind = event.WhichOneof("kind")
        if kind == "admitted":
            await self._on_admitted(event.admitted)
        elif kind == "embedding_fetched":
            self._on_embedding_fetched(event.embedding_fetched)
        elif kind == "kv_ready":
            self._on_kv_ready(event.kv_ready)
        elif kind == "first_token":
            await self._on_first_token(event.first_token)

    async def _on_admitted(self, admitted: prefill_pb2.Admitted) -> None:
        self._timeline.end("admission")
        self._timeline.begin("prefill")
        self._position_delta = admitted.position_delta
        for index in admitted.missing_items:
            if index >= len(self._request.items):
                raise self._broken(self._prefill, f"asks for image {index}")
            self._spawn(self._run_encode(index))
        await self._progress.accept(admitted.cached_tokens)

    def _on_embedding_fetched(self, fetched: prefill_pb2.EmbeddingFetched) -> None:
        index = fetched.index
        self._timeline.end(
            f"embedding transfer[{index}]", fetched.transfer_bytes, fetched.transfer_ms or None
        )
        self._fetched.add(index)
        for stream in self._encoders.get(index, ()):
            stream.finish()

    def _on_kv_ready(self, ready: prefill_pb2.KvReady) -> None:
        self._announced.append(ready)
        if self._decode_task is not None:
            self._decodes[-1].send(decode_pb2.DecodeRequest(kv_ready=ready))
            return
        self._timeline.begin("kv transfer")
        # Opened here, so that the blocks announced next find it.
        self._decode_task = self._spawn(self._run_decode(self._open_decode()))

    async def _on_first_token(self, first: prefill_pb2.FirstToken) -> None:
        self._timeline.end("prefill")
        token = convert.token_from_proto(first.token)
        reason = convert.finish_from_proto(first.finish_reason)
        if reason is None and first.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED:
            raise self._broken(self._prefill, f"finish reason {first.finish_reason} is unknown")
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
            raise self._broken(self._prefill, "gave a token but announced no KV")
        self._start = decode_pb2.Start(first_token=first.token, kv_tokens=first.kv_tokens)
        self._decodes[-1].send(decode_pb2.DecodeRequest(start=self._start))
        await self._progress.extend(self._base, [token])

    def _release_prefill(self) -> None:
        """Nobody reads its blocks any more: they are reusable at once."""
        assert self._prefill is not None
        self._released = True
        self._prefill.finish()

    # --- encode ------------------------------------------------------------------------

    async def _run_encode(self, index: int) -> None:
        """Encode one image; if its encoder dies before prefill was told, on another."""
        for last in (False,) * (_ENCODE_TRIES - 1) + (True,):
            stream = self._open(Stage.ENCODE, self._request.items[index].digest)
            self._encoders.setdefault(index, []).append(stream)
            try:
                ready = await self._encoded(stream, index)
            except StageFault as fault:
                if fault.error.kind in _IMAGE_FAULTS:
                    fault.error.param = self._image_param(index)
                    raise
                self.blame(fault)
                others = self._stages.registry.has_other(
                    Stage.ENCODE, self._progress.avoid[Stage.ENCODE]
                )
                if last or not fault.error.mapping.retryable or not others:
                    raise
                continue
            self._leased.add(stream)
            self._announce(ready)
            return await self._hold_encoder(stream, index)

    def _image_param(self, index: int) -> str | None:
        params = self._request.image_params
        return params[index] if index < len(params) else None

    async def _encoded(self, stream: StageStream, index: int) -> encode_pb2.ItemReady:
        self._timeline.begin(f"encode[{index}]")
        stream.send(self._jobs.encode(index))
        while (event := await stream.next()) is not None:
            if event.WhichOneof("kind") == "ready":
                self._timeline.end(f"encode[{index}]")
                ready: encode_pb2.ItemReady = event.ready
                return ready
        raise self._broken(stream, "ended without an embedding")

    def _announce(self, ready: encode_pb2.ItemReady) -> None:
        assert self._prefill is not None
        self._timeline.begin(f"embedding transfer[{ready.index}]")
        message = prefill_pb2.EmbeddingReady(index=ready.index, handle=ready.handle)
        self._prefill.send(prefill_pb2.PrefillRequest(embedding_ready=message))

    async def _hold_encoder(self, stream: StageStream, index: int) -> None:
        """Keep the lease until prefill has the rows (`_on_embedding_fetched` ends it)."""
        try:
            while (await stream.next()) is not None:
                pass
        except StageFault:
            if index not in self._fetched:
                raise
        if index not in self._fetched:
            raise self._broken(stream, "ended before its embedding was fetched")

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
                self._release_prefill()
            elif kind == "tokens":
                tokens = [convert.token_from_proto(token) for token in event.tokens.tokens]
                await self._progress.extend(event.tokens.first_index, tokens)
            elif kind == "finished":
                return self._on_finished(stream, event.finished)
        raise self._broken(stream, "ended without finishing")

    def _on_finished(self, stream: StageStream, finished: decode_pb2.Finished) -> None:
        self._timeline.end("decode")
        reason = convert.finish_from_proto(finished.reason)
        if reason is None:
            raise self._broken(stream, f"finish reason {finished.reason} is unknown")
        if finished.output_tokens != len(self._progress.output):
            raise self._broken(
                stream,
                f"finished with {finished.output_tokens} tokens, "
                f"{len(self._progress.output)} arrived",
            )
        stream.finish()
        self._decode_done = True
        self._reason = reason

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
        streams = [*self._decodes, *self._all_encoders()]
        if (prefill := self._prefill) is not None:
            request = prefill_pb2.PrefillRequest(cancel=cancel)
            fetched = await self._stopped(prefill, request, done=self._prefill_done)
            _close([prefill], decoded or self._released)
            for encoder in self._all_encoders():
                _close([encoder], fetched and encoder in self._leased)
            streams.append(prefill)
        await asyncio.gather(*(stream.settle(_SETTLE_S) for stream in streams))

    async def _stopped(self, reader: StageStream, cancel: Any, done: bool) -> bool:
        """Whether no read of this reader is under way any more; asks it to stop first."""
        if done or reader.ended:
            return done or not reader.lost
        return await reader.cancel_and_wait(cancel, self._stages.cancel_bound_s)

    def _all_encoders(self) -> list[StageStream]:
        return [stream for streams in self._encoders.values() for stream in streams]

    # --- common ------------------------------------------------------------------------

    def _open(self, stage: Stage, digest: bytes | None = None) -> StageStream:
        stages = self._stages
        worker = stages.registry.choose(stage, self._progress.avoid[stage], digest)
        left = self._deadline - asyncio.get_running_loop().time()
        timeout_s = left + _DEADLINE_SLACK_S
        return stages.connections.open(stage, worker, timeout_s, self._request.request_id)

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
        avoid = self._progress.avoid
        if self.preempted(fault):
            return
        avoid[fault.stage].append(fault.worker)
        if fault.error.kind is ErrorKind.TRANSFER_FAILED and fault.stage is Stage.PREFILL:
            avoid[Stage.ENCODE] += [stream.worker for stream in self._all_encoders()]
        if fault.lost and fault.error.kind is ErrorKind.STAGE_UNAVAILABLE:
            fault.worker.suspect = True

    def _broken(self, stream: StageStream | None, what: str) -> StageFault:
        assert stream is not None
        error = EpdError(ErrorKind.INTERNAL, f"{stream.stage} {what}")
        return StageFault(error, stream.stage, stream.worker, lost=False)


def _close(owners: list[StageStream], clean: bool) -> None:
    """End leases: half-close releases, a cut quarantines."""
    for stream in owners:
        if clean:
            stream.finish()
        else:
            stream.abort()


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The cause: what a stage or a check said, rather than what followed from it."""
    flat: list[BaseException] = []
    for error in group.exceptions:
        flat.append(_first(error) if isinstance(error, BaseExceptionGroup) else error)
    typed = [error for error in flat if isinstance(error, StageFault | EpdError)]
    return (typed or flat)[0]
