"""One choice of an attempt: its decode call, from the announced blocks to the last token.

All choices of a request share one prefill. Each has a decode call of its own, reads the
announced blocks for itself (the partial last one included), and starts with the token
that prefill sampled for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol

from epd.errors import ErrorKind
from epd.jobs import FinishReason, SampledToken, Stage
from epd.rpc import convert
from gateway.jobs import AttemptJobs
from gateway.progress import Progress, broken
from gateway.streams import StageFault, StageStream
from protos.epd.v1 import common_pb2, decode_pb2, prefill_pb2

FirstOf = prefill_pb2.FirstToken | prefill_pb2.ChoiceToken
"""Either holds the first token of one choice."""


class Source(Protocol):
    """The attempt: prefill's side of what a branch reads."""

    jobs: AttemptJobs
    announced: list[prefill_pb2.KvReady]
    position_delta: int
    released: bool

    def open(self, stage: Stage, progress: Progress) -> StageStream: ...
    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...
    def has_other(self, stage: Stage, progress: Progress) -> bool: ...
    def blame(self, fault: StageFault, branch: Branch) -> None: ...
    def branch_changed(self) -> None: ...
    async def stop_reading(self, stream: StageStream, cancel: common_pb2.Cancel) -> bool: ...


class Branch:
    """`over` or `fetched`: this branch needs prefill's blocks no more."""

    def __init__(self, source: Source, progress: Progress) -> None:
        self.progress = progress
        self.streams: list[StageStream] = []
        self.done = False
        """Decode said Finished: it reads no more, and its call ends by itself."""
        self.fetched = False
        self.over = False
        self.joined = False
        self._source = source
        self._base = len(progress.output)
        self._task: asyncio.Task[None] | None = None
        self._start: decode_pb2.Start | None = None
        self._stopping = False

    @property
    def progressed(self) -> bool:
        """Whether this attempt delivered a token of it."""
        return len(self.progress.output) > self._base

    def reads_no_more(self, stream: StageStream) -> bool:
        """By its own word: it said Finished."""
        return self.done and stream is self.streams[-1]

    @property
    def lost_reader(self) -> bool:
        """Whether contact was lost to a decode that was told of blocks: nobody knows if it
        still reads them."""
        return any(stream.lost and not self.reads_no_more(stream) for stream in self.streams)

    def kv_ready(self, ready: prefill_pb2.KvReady) -> None:
        """More blocks (they are in `source.announced` already); the first opens the call."""
        if self.progress.reason is not None:
            return
        if self._task is not None:
            self.streams[-1].send(decode_pb2.DecodeRequest(kv_ready=ready))
            return
        self._begin("kv transfer")
        # Opened here, so that the blocks announced next find it.
        self._task = self._source.spawn(self._run(self._open()))

    async def first_token(self, stream: StageStream, first: FirstOf) -> None:
        """Its first token, from prefill's `stream`."""
        token = convert.token_from_proto(first.token)
        reason = convert.finish_from_proto(first.finish_reason)
        if reason is None and first.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED:
            raise broken(stream, f"finish reason {first.finish_reason} is unknown")
        if reason is None and not self._source.jobs.decode_follows:
            reason = FinishReason.LENGTH
        if self.progress.reason is not None:
            return
        if reason is None:
            if self._task is None:
                raise broken(stream, "gave a token but announced no KV")
            self._start = decode_pb2.Start(first_token=first.token, kv_tokens=first.kv_tokens)
            self.streams[-1].send(decode_pb2.DecodeRequest(start=self._start))
        await self._deliver(self._base, [token])
        if reason is not None:
            await self._end(reason)
            self.stop()

    def forget_task(self) -> None:
        """The attempt's tasks are done."""
        self._task = None

    def stop(self) -> None:
        """The output is over while decode may still be reading or generating: it is told
        to stop, and then this branch needs no blocks any more."""
        assert self.progress.reason is not None
        if self._task is not None:
            self._task.cancel()
        # With one choice the attempt ends here, and its teardown does the rest.
        if not self._stopping and len(self._source.jobs.choices) > 1:
            self._stopping = True
            self._source.spawn(self._stop())

    async def _stop(self) -> None:
        clean = True
        for stream in self.streams:
            cancel = common_pb2.Cancel(reason="the output is over")
            told = self.reads_no_more(stream)
            clean &= told or await self._source.stop_reading(stream, cancel)
            stream.finish()
        self.over = clean
        self._source.branch_changed()

    def _open(self) -> StageStream:
        """Open a call and tell it all that prefill announced so far."""
        source = self._source
        stream = source.open(Stage.DECODE, self.progress)
        self.streams.append(stream)
        stream.send(source.jobs.decode(source.position_delta, self.progress.choice))
        for ready in source.announced:
            stream.send(decode_pb2.DecodeRequest(kv_ready=ready))
        if self._start is not None:
            stream.send(decode_pb2.DecodeRequest(start=self._start))
        return stream

    async def _run(self, stream: StageStream) -> None:
        """Follow decode to its end; while prefill holds the blocks another can take over."""
        while True:
            try:
                return await self._follow(stream)
            except StageFault as fault:
                self._source.blame(fault, self)
                others = self._source.has_other(Stage.DECODE, self.progress)
                if self._source.released or not fault.error.mapping.retryable or not others:
                    raise
            self.fetched = False
            stream = self._open()

    def _take(self, event: decode_pb2.DecodeEvent) -> bool:
        """Tokens that can be delivered at once, on their way in; not the last ones."""
        if not event.HasField("tokens") or self.progress.reason is not None:
            return False
        if event.tokens.finish_reason:
            return False
        tokens = [convert.token_from_proto(token) for token in event.tokens.tokens]
        return self.progress.offer(event.tokens.first_index, tokens)

    async def _follow(self, stream: StageStream) -> None:
        stream.sink = self._take
        try:
            await self._until_finished(stream)
        finally:
            stream.sink = None

    async def _until_finished(self, stream: StageStream) -> None:
        while (event := await stream.next()) is not None:
            kind = event.WhichOneof("kind")
            if kind == "admitted":
                self.joined = True
            elif kind == "kv_fetched":
                self._finish_phase("kv transfer", event.kv_fetched.transfer_bytes)
                self._begin("decode")
                self.fetched = True
                self._source.branch_changed()
            elif kind == "tokens":
                tokens = [convert.token_from_proto(token) for token in event.tokens.tokens]
                await self._deliver(event.tokens.first_index, tokens)
                self.progress.ending = convert.finish_from_proto(event.tokens.finish_reason)
            elif kind == "finished":
                return await self._finished(stream, event.finished)
        raise broken(stream, "ended without finishing")

    async def _finished(self, stream: StageStream, finished: decode_pb2.Finished) -> None:
        self._finish_phase("decode")
        reason = convert.finish_from_proto(finished.reason)
        if reason is None:
            raise broken(stream, f"finish reason {finished.reason} is unknown")
        if finished.output_tokens != len(self.progress.output):
            raise broken(
                stream,
                f"finished with {finished.output_tokens} tokens, "
                f"{len(self.progress.output)} arrived",
            )
        stream.finish()
        self.done = self.over = True
        await self._end(reason)
        self._source.branch_changed()

    async def _end(self, reason: FinishReason) -> None:
        self.progress.reason = reason
        if len(self._source.jobs.choices) > 1:
            # Told at once: the other choices may take long.
            await self.progress.end()

    async def _deliver(self, first_index: int, tokens: list[SampledToken]) -> None:
        await self.progress.extend(first_index, tokens)

    def preempted(self, fault: StageFault) -> bool:
        """Decode had taken the request and pushed it out for want of blocks: not a
        failure, it may go on in the same place."""
        crowded = fault.error.kind is ErrorKind.OVERLOADED
        return crowded and fault.stage is Stage.DECODE and self.joined

    def _phase(self, name: str) -> str:
        return f"{name}[{self.progress.choice}]" if self.progress.choice else name

    def _begin(self, name: str) -> None:
        self.progress.timeline.begin(self._phase(name))

    def _finish_phase(self, name: str, moved: int = 0) -> None:
        self.progress.timeline.end(self._phase(name), moved)
