"""A call to one stage, as the pipeline holds it: sends never block, reads are bounded.

grpc.aio cancels a whole call when a task that awaits its read or write is
cancelled. Here two tasks of the stream's own do that, so the pipeline's tasks can
be cancelled and the call still be closed in order (Cancel, ReadsTerminal, end).
A reader that lags fills the inbox; then nothing more is read from the wire, and
flow control holds the sender back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from epd.config import RpcConfig
from epd.errors import EpdError, ErrorKind
from epd.jobs import Stage
from epd.rpc.channels import Dialer
from epd.rpc.status import from_rpc_error
from gateway.worker import Worker
from protos.epd.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    encode_pb2,
    encode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)

_INBOX = 64
_DETAILS = "grpc-status-details-bin"
_LOCAL_FAULT = "Internal error from Core"
_PASSED_ON = frozenset({"embedding_ready", "kv_ready", "start"})
_STATUS_POLLS = 100
_STATUS_POLL_S = 0.005
_STUBS: dict[Stage, Any] = {
    Stage.ENCODE: encode_pb2_grpc.EncodeStub,
    Stage.PREFILL: prefill_pb2_grpc.PrefillStub,
    Stage.DECODE: decode_pb2_grpc.DecodeStub,
}
_RECALLS: dict[Stage, Any] = {
    Stage.ENCODE: encode_pb2.EncodeRequest(recall=common_pb2.Recall()),
    Stage.PREFILL: prefill_pb2.PrefillRequest(recall=common_pb2.Recall()),
    Stage.DECODE: decode_pb2.DecodeRequest(recall=common_pb2.Recall()),
}


class StageFault(Exception):
    """A stage failed the request. `lost`: contact broke, so nobody told us why."""

    def __init__(self, error: EpdError, stage: Stage, worker: Worker, lost: bool) -> None:
        super().__init__(f"{stage} {worker.card.address}: {error.message}")
        self.error = error
        self.stage = stage
        self.worker = worker
        self.lost = lost

    @property
    def handed_back(self) -> bool:
        """By a worker that leaves, before anything was begun: no failure, and it can be so
        but once for each worker."""
        return self.error.kind is ErrorKind.NOT_STARTED and self.worker.draining


class StageStream:
    """One bidirectional call. `next` may be used by one task at a time."""

    def __init__(self, stage: Stage, worker: Worker, call: Any, on_end: Callable[[], None]) -> None:
        self.stage = stage
        self.worker = worker
        self.lost = False
        self.sink: Callable[[Any], bool] | None = None
        """Offered each event first, where none waits; what it takes, `next` won't give. It
        saves a wake-up for every token."""
        self._call: Any = call
        """None once the call has ended. Whoever keeps this stream, or an error that passed
        it, then keeps neither the call nor its connection."""
        self._on_end = on_end
        self._inbox: deque[Any] = deque()
        self._outbox: asyncio.Queue[Any] = asyncio.Queue()
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._ended = asyncio.Event()
        self._error: EpdError | None = None
        self.half_closed = False
        self.spoken = False
        """It was asked something."""
        self._status: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._on_status)
        worker.streams.add(self)
        worker.pending += 1
        self._tasks = (asyncio.create_task(self._read()), asyncio.create_task(self._write()))

    def send(self, message: Any) -> None:
        """Queue a message; dropped if the call has ended (`next` tells why)."""
        if not self.half_closed:
            self.spoken = True
            self._outbox.put_nowait(message)

    def finish(self) -> None:
        """Half-close: the lease, or the job, is over cleanly. May be called twice."""
        if not self.half_closed:
            self.half_closed = True
            self._outbox.put_nowait(None)

    def abort(self) -> None:
        """End the call without a word: its owner must quarantine."""
        if not self._ended.is_set():
            self.lost = True
            self._room.set()  # else a read that waits for room would never see the end
            self._call.cancel()

    def lose(self, error: EpdError) -> None:
        """The worker is taken for dead: whoever waits is told so now."""
        if not self._ended.is_set():
            self._error = self._error or error
            self.abort()

    def recall(self) -> None:
        """The worker leaves: it ends the call with NOT_STARTED if nothing was begun. A call
        that has no job yet (see `ahead`) gets none."""
        if self.spoken:
            self.send(_RECALLS[self.stage])
        else:
            self.abort()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    async def next(self) -> Any:
        """The next event; None after the call's clean end.

        Raises:
            StageFault: the call failed.
        """
        while not self._inbox:
            if self._ended.is_set():
                if self._error is not None:
                    raise StageFault(self._error, self.stage, self.worker, self.lost)
                return None
            self._news.clear()
            await self._news.wait()
        event = self._inbox.popleft()
        self._room.set()
        return event

    async def cancel_and_wait(self, message: Any, bound_s: float) -> bool:
        """Ask a reader to stop; True once it says that no read is under way."""
        self.send(message)
        try:
            async with asyncio.timeout(bound_s):
                while (event := await self.next()) is not None:
                    if event.WhichOneof("kind") == "reads_terminal":
                        return bool(event.reads_terminal.clean)
        except StageFault:
            return not self.lost
        except TimeoutError:
            return False
        return not self.lost

    async def settle(self, bound_s: float) -> None:
        """Wait for the call's end, dropping events; force it when the bound runs out."""
        try:
            async with asyncio.timeout(bound_s):
                while (await self.next()) is not None:
                    pass
        except StageFault:
            pass
        except TimeoutError:
            self.abort()
        reading, writing = self._tasks
        await asyncio.wait({reading})
        # The call is over. A write to one that was given up before it reached its worker
        # would wait for ever: grpc.aio (1.85) wakes it only when the call's head was sent.
        writing.cancel()
        await asyncio.wait({writing})

    async def _read(self) -> None:
        call = self._call
        try:
            async for event in call:
                if not self._inbox and self.sink is not None and self.sink(event):
                    continue
                self._inbox.append(event)
                self._news.set()
                while len(self._inbox) >= _INBOX and not self.lost:
                    self._room.clear()
                    await self._room.wait()
        except grpc.aio.AioRpcError as error:
            await self._fail(call, error)
        except asyncio.CancelledError:
            # Our own `abort`; nobody cancels this task.
            self.lost = True
            self._error = self._error or EpdError(ErrorKind.CANCELLED, "the call was cancelled")
        finally:
            self._ended.set()
            self._news.set()
            self._outbox.put_nowait(None)
            self.worker.streams.discard(self)
            self._call = None
            on_end, self._on_end = self._on_end, _nothing
            on_end()

    def _on_status(self, call: Any) -> None:
        """Called by grpc.aio when the call's status is set for the first time.

        A write that is under way when the peer ends the call makes grpc.aio set
        INTERNAL itself (`_StreamRequestMixin._write`), before or after the status that
        was received. Only that one counts: kept here if it comes first, looked for by
        `_fail` if it comes after.
        """
        if (status := _status_of(call)).details() != _LOCAL_FAULT:
            self._status = status

    async def _fail(self, call: Any, error: grpc.aio.AioRpcError) -> None:
        for _ in range(_STATUS_POLLS):
            if error.details() != _LOCAL_FAULT:
                break
            error = self._status or _status_of(call)
            if error.details() == _LOCAL_FAULT:
                await asyncio.sleep(_STATUS_POLL_S)
        if error.code() is grpc.StatusCode.OK:
            return
        self.lost = not any(key == _DETAILS for key, _ in error.trailing_metadata() or ())
        found = from_rpc_error(error)
        if error.details() == _LOCAL_FAULT:
            found = EpdError(ErrorKind.STAGE_UNAVAILABLE, "the call broke under a message")
        elif self.lost and found.kind is ErrorKind.CANCELLED:
            # Not by us (`abort` ends the read another way): a server that stops does that.
            found = EpdError(ErrorKind.STAGE_UNAVAILABLE, "the worker stopped", retry_after_s=1.0)
        self._error = self._error or _of_peers(found)

    async def _write(self) -> None:
        call = self._call
        try:
            while (message := await self._outbox.get()) is not None:
                await call.write(message)
            if not self._ended.is_set():
                await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            return  # the call has ended; `_read` knows why


def _of_peers(error: EpdError) -> EpdError:
    """What is wrong with words that we passed on from another stage is a peer's fault, never
    the client's."""
    told = (error.param or "").partition(".")[0]
    if error.kind is not ErrorKind.INVALID_REQUEST or told not in _PASSED_ON:
        return error
    return EpdError(ErrorKind.CONTRACT_MISMATCH, f"{error.param}: {error.message}")


def _nothing() -> None:
    """There is nobody to tell any more."""


def _status_of(call: Any) -> grpc.aio.AioRpcError:
    """Of a call whose status is set."""
    code, details = _now(call.code()), _now(call.details())
    empty = grpc.aio.Metadata()
    trailing = _now(call.trailing_metadata()) or empty
    return grpc.aio.AioRpcError(code, empty, trailing, details)


def _now(answer: Any) -> Any:
    """Result of a coroutine that has nothing to wait for (the call's status is known)."""
    try:
        answer.send(None)
    except StopIteration as result:
        return result.value
    answer.close()
    return None


@dataclass(slots=True, eq=False)
class _Line:
    """A channel to one life of a worker, and what runs on it."""

    worker: Worker
    channel: grpc.aio.Channel
    generation: int
    calls: int = 0
    """Under way. A count, since a stream that is kept here keeps 27 KB."""
    stubs: dict[Stage, Any] = field(default_factory=dict)

    def stub(self, stage: Stage) -> Any:
        if stage not in self.stubs:
            self.stubs[stage] = _STUBS[stage](self.channel)
        return self.stubs[stage]

    def release(self) -> None:
        self.calls -= 1


class Connections:
    """One channel to each worker, opened when first used, and anew for calls that come
    after a change of the certificates."""

    def __init__(self, config: RpcConfig) -> None:
        """
        Raises:
            EpdError: the certificates can't be used.
        """
        self._dialer = Dialer(config)
        self._lines: dict[int, _Line] = {}
        self._former: list[_Line] = []

    def open(self, stage: Stage, worker: Worker, timeout_s: float, request_id: str) -> StageStream:
        """Start a call. It ends at the deadline by itself."""
        line = self._line(worker)
        call = line.stub(stage).Run(
            timeout=max(timeout_s, 0.001), metadata=(("x-request-id", request_id),)
        )
        line.calls += 1
        return StageStream(stage, worker, call, line.release)

    def _line(self, worker: Worker) -> _Line:
        generation = self._dialer.generation()
        known = self._lines.get(id(worker))
        if known is None or known.generation != generation:
            if known is not None:
                self._former.append(known)
            known = _Line(worker, self._dialer.dial(worker.card.address), generation)
            self._lines[id(worker)] = known
        return known

    async def prune(self) -> None:
        """Close channels that hold no call any more and get no new one."""
        closing = [line for line in self._former if not line.calls]
        self._former = [line for line in self._former if line not in closing]
        for key, line in list(self._lines.items()):
            if not line.calls and line.worker.gone:
                closing.append(self._lines.pop(key))
        for line in closing:
            await line.channel.close()

    async def close(self) -> None:
        lines = [*self._lines.values(), *self._former]
        self._lines, self._former = {}, []
        for line in lines:
            await line.channel.close()
