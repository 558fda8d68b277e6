"""Scripted stages in the test's own process: real gRPC, no model, every step in a journal.

A fake does what its stage's contract says. A hook at a named point can wait, raise
an `EpdError`, or break the worker; see `POINTS`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from epd import __version__
from epd.config import RpcConfig
from epd.errors import EpdError, ErrorKind
from epd.jobs import Stage
from epd.models.spec import ModelSpec
from epd.rpc.server import Server
from epd.runtime.streams import SETTLE_S
from protos.epd.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    encode_pb2,
    encode_pb2_grpc,
    membership_pb2,
    membership_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)

POINTS = (
    "encode.job",
    "encode.run",
    "prefill.job",
    "prefill.fetch",
    "prefill.kv",
    "prefill.first",
    "decode.job",
    "decode.fetch",
    "decode.token",
    "decode.finish",
    "encode.terminal",
    "prefill.terminal",
    "decode.terminal",
)
_MESSAGE = 32 << 20
_BLOCK = 4
_SERVICES: dict[Stage, tuple[str, Callable[[Any, grpc.aio.Server], None]]] = {
    Stage.ENCODE: ("epd.v1.Encode", encode_pb2_grpc.add_EncodeServicer_to_server),
    Stage.PREFILL: ("epd.v1.Prefill", prefill_pb2_grpc.add_PrefillServicer_to_server),
    Stage.DECODE: ("epd.v1.Decode", decode_pb2_grpc.add_DecodeServicer_to_server),
}


def hello_of(spec: ModelSpec) -> dict[str, Any]:
    """What a worker of this model says of itself, apart from its place."""
    return {
        "fingerprint": spec.fingerprint,
        "version": __version__,
        "dtype": spec.dtype,
        "kv_layout": "kv-block-major/1",
        "kv_block_shape": [4, 2],
    }


@dataclass(eq=False)
class Call:
    """One Run call at a fake."""

    stage: Stage
    worker: Fake
    context: Any
    jobs: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    recalled: asyncio.Event = field(default_factory=asyncio.Event)
    """Before anything was begun."""
    begun: bool = False
    half_closed: asyncio.Event = field(default_factory=asyncio.Event)
    job: Any = None
    token: int = 0
    """Index of the output token that "decode.token" is at."""

    async def read(self, requests: AsyncIterator[Any]) -> None:
        async for request in requests:
            if request.WhichOneof("kind") == "cancel":
                self.worker.note("Cancel")
                self.cancelled.set()
            elif request.WhichOneof("kind") == "recall":
                if not self.begun:
                    self.recalled.set()
            else:
                self.jobs.put_nowait(request)
        # A cut looks like a half-close for a moment; see epd.runtime.streams.
        await asyncio.sleep(SETTLE_S)
        self.half_closed.set()

    async def next(self, kind: str) -> Any:
        request = await self.jobs.get()
        assert request.WhichOneof("kind") == kind, request
        return getattr(request, kind)


Hook = Callable[[Call], Awaitable[None]]


@dataclass
class Script:
    """What all fakes of a test do."""

    output: list[int] = field(default_factory=lambda: list(range(300, 310)))
    """Ids of the whole output; the last one ends it."""
    finish: common_pb2.FinishReason.ValueType = common_pb2.FINISH_REASON_STOP
    missing: list[int] | None = None
    """Images that prefill lacks; None: all."""
    cached_tokens: int = 0
    clean: bool = True
    """What readers say in ReadsTerminal."""
    tokens_per_message: int = 1
    logprob: float = -0.5
    """Of every token; one that JSON has no word for is that of all alternatives, too."""
    alternatives: int = 0
    """Most likely tokens beside each one of decode's: makes messages large."""
    hooks: dict[str, Hook] = field(default_factory=dict)
    journal: list[str] = field(default_factory=list)
    jobs: list[tuple[Stage, Any]] = field(default_factory=list)
    """Every job that came, in order."""

    def output_of(self, choice: int) -> list[int]:
        """Every choice says the same, but for its first token."""
        return [self.output[0] + choice, *self.output[1:]]

    def token(self, token_id: int, alternatives: int = 0) -> common_pb2.Token:
        odd = None if math.isfinite(self.logprob) else self.logprob
        top = [
            common_pb2.TokenLogprob(id=i, logprob=-i if odd is None else odd)
            for i in range(alternatives)
        ]
        return common_pb2.Token(id=token_id, logprob=self.logprob, top=top)

    def jobs_of(self, stage: Stage) -> list[Any]:
        return [job for of, job in self.jobs if of is stage]

    async def at(self, point: str, call: Call) -> None:
        assert point in POINTS
        if hook := self.hooks.get(point):
            await hook(call)


class Fake:
    """One worker of one stage, registered at a gateway."""

    def __init__(self, stage: Stage, name: str, script: Script, hello: dict[str, Any]) -> None:
        self.stage = stage
        self.name = name
        self.script = script
        self.calls: set[Call] = set()
        self.address = ""
        self._hello = hello
        service, add = _SERVICES[stage]
        self._server = Server(stage, [service], RpcConfig(), _MESSAGE)
        add(self, self._server.grpc)
        self._member: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self.leaving = False
        """Says so with its next heartbeats."""
        self.beating = asyncio.Event()
        self.beating.set()

    def note(self, what: str) -> None:
        self.script.journal.append(f"{self.name}: {what}")

    async def start(self, membership: str, port: int = 0) -> None:
        self.address = await self._server.start("127.0.0.1", port)
        await self._server.set_serving(True)
        self._member = asyncio.create_task(self._join(membership))

    async def stop(self) -> None:
        """End as a killed process does: its calls break, its membership ends. May be
        called twice, and from a hook (whose call it breaks)."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        if self._member is not None:
            self._member.cancel()
            # Invalid state: the gateway gave it up before.
            lost = (asyncio.CancelledError, grpc.aio.AioRpcError, asyncio.InvalidStateError)
            with contextlib.suppress(*lost):
                await self._member
        await self._server.grpc.stop(None)

    async def _join(self, membership: str) -> None:
        stages = {
            Stage.ENCODE: membership_pb2.STAGE_ENCODE,
            Stage.PREFILL: membership_pb2.STAGE_PREFILL,
            Stage.DECODE: membership_pb2.STAGE_DECODE,
        }
        hello = membership_pb2.Hello(
            stages=[stages[self.stage]], address=self.address, **self._hello
        )
        async with grpc.aio.insecure_channel(membership) as channel:
            call = membership_pb2_grpc.MembershipStub(channel).Join()
            await call.write(membership_pb2.WorkerReport(hello=hello))
            while True:
                await asyncio.sleep(0.05)
                await self.beating.wait()
                beat = membership_pb2.Heartbeat(running=len(self.calls), serving=True)
                await call.write(membership_pb2.WorkerReport(heartbeat=beat))
                if self.leaving:
                    goodbye = membership_pb2.Leaving(grace_ms=1000)
                    await call.write(membership_pb2.WorkerReport(leaving=goodbye))

    # --- the service -------------------------------------------------------------------

    async def Run(self, requests: AsyncIterator[Any], context: Any) -> None:
        call = Call(self.stage, self, context)
        self.calls.add(call)
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(call.read(requests))]
        try:
            job = await call.next("job")
            call.job = job
            self.script.jobs.append((self.stage, job))
            self.note(f"job {job.attempt}" if job.attempt else "job")
            steps = asyncio.create_task(getattr(self, f"_{self.stage}")(call))
            told = [asyncio.create_task(e.wait()) for e in (call.cancelled, call.recalled)]
            tasks += [steps, *told]
            await asyncio.wait({steps, *told}, return_when=asyncio.FIRST_COMPLETED)
            if steps.done():
                steps.result()
            elif call.recalled.is_set():
                self.note("given back")
                raise EpdError(ErrorKind.NOT_STARTED, "leaving", retry_after_s=1.0)
            else:
                steps.cancel()
                await self._terminal(call)
        except asyncio.CancelledError:
            if call.job is not None:  # else it was opened ahead, for a job that never came
                self.note("cut")
            raise
        finally:
            for task in tasks:
                task.cancel()
            self.calls.discard(call)

    async def _terminal(self, call: Call) -> None:
        await self.script.at(f"{self.stage}.terminal", call)
        event = {Stage.PREFILL: prefill_pb2.PrefillEvent, Stage.DECODE: decode_pb2.DecodeEvent}
        self.note("ReadsTerminal")
        terminal = common_pb2.ReadsTerminal(clean=self.script.clean)
        await call.context.write(event[self.stage](reads_terminal=terminal))
        if self.stage is Stage.PREFILL:
            await self._released(call)

    async def _released(self, call: Call) -> None:
        await call.half_closed.wait()
        self.note("half-close")

    async def _encode(self, call: Call) -> None:
        await self.script.at("encode.job", call)
        call.begun = True
        await self.script.at("encode.run", call)
        index = call.job.item.index
        handle = common_pb2.Handle(contract=common_pb2.Contract(nonce=call.job.nonce))
        ready = encode_pb2.ItemReady(index=index, handle=handle)
        await call.context.write(encode_pb2.EncodeEvent(ready=ready))
        self.note(f"ItemReady {index}")
        await self._released(call)

    async def _prefill(self, call: Call) -> None:
        script, job, write = self.script, call.job, call.context.write
        await script.at("prefill.job", call)
        call.begun = True
        missing = range(len(job.items)) if script.missing is None else script.missing
        admitted = prefill_pb2.Admitted(
            cached_tokens=script.cached_tokens, missing_items=missing, position_delta=-3
        )
        await write(prefill_pb2.PrefillEvent(admitted=admitted))
        for _ in missing:
            ready = await call.next("embedding_ready")
            assert ready.handle.contract.nonce == job.nonce
            await script.at("prefill.fetch", call)
            self.note(f"EmbeddingFetched {ready.index}")
            fetched = prefill_pb2.EmbeddingFetched(index=ready.index, transfer_bytes=8)
            await write(prefill_pb2.PrefillEvent(embedding_fetched=fetched))
        total = len(job.token_ids)
        if job.decode_follows:
            for first in range(0, total, _BLOCK):
                await script.at("prefill.kv", call)
                tokens = min(first + _BLOCK, total)
                ready = prefill_pb2.KvReady(first_block=first // _BLOCK, tokens=tokens)
                await write(prefill_pb2.PrefillEvent(kv_ready=ready))
        await script.at("prefill.first", call)
        index = total - job.prompt_length
        last = index + 1 == len(script.output)
        token = prefill_pb2.FirstToken(
            token=script.token(script.output_of(job.sampling.choice)[index]),
            finish_reason=script.finish if last else common_pb2.FINISH_REASON_UNSPECIFIED,
            kv_tokens=total,
            others=[
                prefill_pb2.ChoiceToken(
                    token=script.token(script.output_of(choice)[index]),
                    finish_reason=script.finish if last else common_pb2.FINISH_REASON_UNSPECIFIED,
                    kv_tokens=total,
                )
                for choice in range(1, job.choices)
            ],
        )
        self.note("FirstToken")
        await write(prefill_pb2.PrefillEvent(first_token=token))
        await self._released(call)

    async def _decode(self, call: Call) -> None:
        script, job, write = self.script, call.job, call.context.write
        await script.at("decode.job", call)
        call.begun = True
        await write(decode_pb2.DecodeEvent(admitted=decode_pb2.DecodeAdmitted()))
        announced = 0
        while announced < len(job.token_ids):
            ready = await call.next("kv_ready")
            assert ready.first_block * _BLOCK == announced
            announced = ready.tokens
        await script.at("decode.fetch", call)
        self.note("KvFetched")
        fetched = decode_pb2.KvFetched(transfer_bytes=16)
        await write(decode_pb2.DecodeEvent(kv_fetched=fetched))
        start = await call.next("start")
        assert start.kv_tokens == announced
        done = len(job.token_ids) - job.prompt_length + 1
        while done < len(script.output):
            call.token = done
            await script.at("decode.token", call)
            output = script.output_of(job.sampling.choice)
            ids = output[done : done + script.tokens_per_message]
            tokens = [script.token(token_id, script.alternatives) for token_id in ids]
            message = decode_pb2.Tokens(first_index=done, tokens=tokens)
            done += len(ids)
            if done == len(script.output):
                message.finish_reason = script.finish
            await write(decode_pb2.DecodeEvent(tokens=message))
        await script.at("decode.finish", call)
        self.note("Finished")
        finished = decode_pb2.Finished(reason=script.finish, output_tokens=done)
        await write(decode_pb2.DecodeEvent(finished=finished))


def fail(kind: ErrorKind, message: str = "scripted", times: int | None = None) -> Hook:
    """A hook that raises, the first `times` times."""
    left = [times]

    async def hook(call: Call) -> None:
        if left[0] is None:
            raise EpdError(kind, message, retry_after_s=1.0)
        if left[0] > 0:
            left[0] -= 1
            raise EpdError(kind, message, retry_after_s=1.0)

    return hook


async def hang(call: Call) -> None:
    """A hook that never goes on (until the call ends)."""
    await asyncio.Event().wait()
