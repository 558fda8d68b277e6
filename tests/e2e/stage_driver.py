"""A client that sequences the three stages as a gateway would."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc.aio
from PIL import Image

from epd.config import RpcConfig
from epd.errors import EpdError
from epd.jobs import DecodeJob, EncodeJob, ImageItem, PrefillJob, SamplingParams
from epd.models.processor import Processor
from epd.models.spec import read_spec
from epd.rpc.channels import dial
from epd.rpc.jobs import decode_job_to_proto, encode_job_to_proto, prefill_job_to_proto
from epd.rpc.status import from_rpc_error
from protos.epd.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    encode_pb2,
    encode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)
from tests.e2e.stage_processes import Stages
from tests.tiny.reference import reference_inputs
from tests.waiting import until


@dataclass
class Request:
    """What a gateway knows before it calls a stage."""

    token_ids: list[int]
    prompt_length: int
    items: list[ImageItem]
    files: list[bytes]
    sampling: SamplingParams
    fingerprint: str
    arrival_ms: int = field(default_factory=lambda: int(time.time() * 1000))
    name: str = field(default_factory=lambda: f"req-{secrets.token_hex(4)}")
    nonce: int = field(default_factory=lambda: secrets.randbits(64))
    salt: bytes = b""
    """A random one: no cache knows anything of it."""

    @property
    def of_both(self) -> dict[str, Any]:
        """What the jobs for prefill and for decode have in common."""
        return {
            "request_id": self.name,
            "attempt": 1,
            "nonce": self.nonce,
            "token_ids": tuple(self.token_ids),
            "prompt_length": self.prompt_length,
            "items": tuple(self.items),
            "sampling": self.sampling,
            "salt": self.salt,
        }


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


class Planner:
    """Turns messages and pictures into requests, once a checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.processor = Processor.load(checkpoint)
        self.spec = read_spec(checkpoint)

    def request(
        self,
        messages: Sequence[dict[str, Any]],
        images: Sequence[Image.Image] = (),
        sampling: SamplingParams | None = None,
    ) -> Request:
        ids = reference_inputs(self.checkpoint, messages, images)["input_ids"][0].tolist()
        items = []
        for index, image in enumerate(images):
            plan = self.processor.plan(*image.size, len(images))
            digest = secrets.token_bytes(32)
            items.append(ImageItem(index, digest, plan.rows, plan.grid, *image.size, len(images)))
        return Request(
            ids,
            len(ids),
            items,
            [png(image) for image in images],
            sampling or greedy(self.spec.eos_token_ids),
            self.spec.fingerprint,
        )


def greedy(eos: Sequence[int] = (), max_tokens: int = 16, **more: Any) -> SamplingParams:
    return SamplingParams(eos_token_ids=tuple(eos), max_tokens=max_tokens, **more)


@dataclass
class Answer:
    ids: list[int] = field(default_factory=list)
    finish: int = 0
    delta: int = 0
    tokens: list[common_pb2.Token] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    """Names of all events, in order of arrival, with the stage."""
    output_tokens: int = 0


class Client:
    """Drives one worker of each stage."""

    def __init__(self, stages: Stages) -> None:
        self._channels = {
            stage: dial(process.address, RpcConfig()) for stage, process in stages.processes.items()
        }
        self.encode = encode_pb2_grpc.EncodeStub(self._channels["encode"])
        self.prefill = prefill_pb2_grpc.PrefillStub(self._channels["prefill"])
        self.decode = decode_pb2_grpc.DecodeStub(self._channels["decode"])

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def run(self, request: Request, **hooks: Any) -> Answer:
        """One request from start to end, with clean releases."""
        return await _Run(self, request, **hooks).go()

    async def run_resuming(self, request: Request) -> tuple[list[int], int]:
        """As a gateway: a request that decode pushed out is prefilled again with what
        it has. (ids, times that it was pushed out)"""
        ids: list[int] = []
        for pushed_out in itertools.count():
            run = _Run(self, continued(request, ids))
            try:
                await run.go()
            except (StageFailed, grpc.aio.AioRpcError) as error:
                code = error.code if isinstance(error, StageFailed) else error.code()
                if code is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
                ids += run.answer.ids
                await asyncio.sleep(0.1)
                continue
            return ids + run.answer.ids, pushed_out
        raise AssertionError

    # one call each, for tests that do it step by step

    async def start_encode(self, request: Request, index: int) -> Any:
        call = self.encode.Run(timeout=60)
        job = EncodeJob(request.name, 1, request.nonce, request.items[index], request.files[index])
        message = encode_job_to_proto(job, request.fingerprint)
        await call.write(encode_pb2.EncodeRequest(job=message))
        return call

    async def start_prefill(
        self, request: Request, decode_follows: bool = True, timeout_s: float = 60
    ) -> Any:
        call = self.prefill.Run(timeout=timeout_s)
        job = PrefillJob(**request.of_both, decode_follows=decode_follows)
        message = prefill_job_to_proto(job, request.fingerprint)
        remember_status(call)
        await call.write(prefill_pb2.PrefillRequest(job=message))
        return call

    async def start_decode(self, request: Request, delta: int) -> Any:
        call = self.decode.Run(timeout=60)
        job = DecodeJob(**request.of_both, position_delta=delta, arrival_ms=request.arrival_ms)
        message = decode_job_to_proto(job, request.fingerprint)
        remember_status(call)
        await call.write(decode_pb2.DecodeRequest(job=message))
        return call


async def next_event(call: Any, kind: str) -> Any:
    """The next event, which must be `kind`."""
    event = await call.read()
    assert event is not grpc.aio.EOF, f"the stream ended: {await call.code()}"
    assert event.WhichOneof("kind") == kind, event
    return getattr(event, kind)


@dataclass
class _Run:
    client: Client
    request: Request
    encode_order: Sequence[int] | None = None
    """Announce images to prefill in this order."""
    on_kv: Callable[[prefill_pb2.KvReady], prefill_pb2.KvReady] = lambda ready: ready
    on_embedding: Callable[[common_pb2.Handle], common_pb2.Handle] = lambda handle: handle
    answer: Answer = field(default_factory=Answer)
    prefill: Any = None
    decode: Any = None
    encodes: dict[int, Any] = field(default_factory=dict)
    feeding: asyncio.Task[None] | None = None

    async def go(self) -> Answer:
        follows = self.request.sampling.max_tokens > 1
        self.prefill = await self.client.start_prefill(self.request, follows)
        try:
            await self._prefill()
        except BaseException:
            if self.feeding:
                self.feeding.cancel()
                await asyncio.gather(self.feeding, return_exceptions=True)
            for call in (self.prefill, self.decode, *self.encodes.values()):
                if call is not None:
                    call.cancel()
            raise
        return self.answer

    async def _prefill(self) -> None:
        while (event := await self.prefill.read()) is not grpc.aio.EOF:
            kind = event.WhichOneof("kind")
            self.answer.events.append(f"prefill.{kind}")
            if kind == "admitted":
                self.answer.delta = event.admitted.position_delta
                order = self.encode_order or event.admitted.missing_items
                self.feeding = asyncio.create_task(self._encode_all(order))
            elif kind == "embedding_fetched":
                await self.encodes[event.embedding_fetched.index].done_writing()
            elif kind == "kv_ready":
                await self._forward_kv(self.on_kv(event.kv_ready))
            elif kind == "first_token":
                await self._first_token(event.first_token)
        if await self.prefill.code() is not grpc.StatusCode.OK:
            raise await failure(self.prefill)
        if self.feeding:
            await self.feeding
        for call in self.encodes.values():
            assert await call.code() is grpc.StatusCode.OK

    async def _encode_all(self, order: Sequence[int]) -> None:
        for index in order:
            call = await self.client.start_encode(self.request, index)
            await next_event(call, "accepted")
            ready = await next_event(call, "ready")
            self.encodes[index] = call
            message = prefill_pb2.EmbeddingReady(
                index=index, handle=self.on_embedding(ready.handle)
            )
            await self._send(self.prefill, prefill_pb2.PrefillRequest(embedding_ready=message))

    async def _forward_kv(self, ready: prefill_pb2.KvReady) -> None:
        if self.decode is None:
            self.decode = await self.client.start_decode(self.request, self.answer.delta)
        await self._send(self.decode, decode_pb2.DecodeRequest(kv_ready=ready))

    async def _first_token(self, first: prefill_pb2.FirstToken) -> None:
        self._take([first.token])
        self.answer.finish = first.finish_reason
        if not first.finish_reason:
            start = decode_pb2.Start(first_token=first.token, kv_tokens=first.kv_tokens)
            await self._send(self.decode, decode_pb2.DecodeRequest(start=start))
            await self._decode()
        elif self.decode is not None:
            self.decode.cancel()
        await self.prefill.done_writing()

    async def _decode(self) -> None:
        while (event := await self.decode.read()) is not grpc.aio.EOF:
            kind = event.WhichOneof("kind")
            self.answer.events.append(f"decode.{kind}")
            if kind == "kv_fetched":
                await self.prefill.done_writing()
            elif kind == "tokens":
                assert event.tokens.first_index == self._outputs(), event
                self._take(event.tokens.tokens)
            elif kind == "finished":
                self.answer.finish = event.finished.reason
                self.answer.output_tokens = event.finished.output_tokens
        if await self.decode.code() is not grpc.StatusCode.OK:
            raise await failure(self.decode)

    def _outputs(self) -> int:
        generated = len(self.request.token_ids) - self.request.prompt_length
        return generated + len(self.answer.ids)

    def _take(self, tokens: Sequence[common_pb2.Token]) -> None:
        self.answer.ids += [token.id for token in tokens]
        self.answer.tokens += tokens

    async def _send(self, call: Any, message: Any) -> None:
        try:
            await call.write(message)
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            if call is self.decode:
                await _drain(call)
            raise await failure(call) from None


_LOCAL_FAULT = "Internal error from Core"
_TOLD: weakref.WeakKeyDictionary[Any, StageFailed] = weakref.WeakKeyDictionary()


def remember_status(call: Any) -> None:
    """A write into a stream that its stage has just ended makes gRPC say INTERNAL over,
    or before, the status that the stage sent: keep that one."""

    def told(ended: Any) -> None:
        code, details, metadata = (
            _now(ask()) for ask in (ended.code, ended.details, ended.trailing_metadata)
        )
        if details != _LOCAL_FAULT:
            _TOLD[ended] = StageFailed(code, details, tuple(metadata or ()))

    call.add_done_callback(told)


def _now(answer: Any) -> Any:
    """Result of a coroutine that has nothing to wait for."""
    try:
        answer.send(None)
    except StopIteration as result:
        return result.value
    raise AssertionError("the call has not ended")


async def _drain(call: Any) -> None:
    """Read what nobody reads: a stream's status comes behind the last of its messages."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass


async def failure(call: Any) -> StageFailed:
    """Why a call ended, in its stage's words."""
    await until(lambda: call in _TOLD)
    return _TOLD[call]


async def said(call: Any, error: grpc.aio.AioRpcError) -> EpdError:
    """The error that a call's stage ended it with, whatever gRPC makes of a write into it."""
    if error.details() == _LOCAL_FAULT:
        told = await failure(call)
        metadata = grpc.aio.Metadata(*told.metadata)
        error = grpc.aio.AioRpcError(told.code, grpc.aio.Metadata(), metadata, told.details)
    return from_rpc_error(error)


@dataclass
class StageFailed(Exception):
    code: grpc.StatusCode
    details: str
    metadata: tuple[Any, ...]


def continued(request: Request, generated: Sequence[int]) -> Request:
    """The same request after a failover: generated ids are prefilled again."""
    return replace(
        request,
        token_ids=[*request.token_ids[: request.prompt_length], *generated],
        nonce=secrets.randbits(64),
    )
