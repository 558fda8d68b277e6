"""A scripted engine: stages in one process that compute nothing and keep their contract.

    python -m bench.gateway.engine MEMBERSHIP FINGERPRINT TOKENS RATE

Every stream gets one token a tick, RATE ticks a second (0: as fast as it is read), as
decode's batches give them: all streams at once. Pictures are encoded and fetched in no time.
TOKENS is the length of every answer.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from bench.loopback import GRPC_OPTIONS
from epd import __version__
from epd.config import RpcConfig
from epd.lifetime import die_with_expected_parent
from epd.rpc.server import Server
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

DTYPE = "bfloat16"
_FIRST_ID = 400
_IDS = 50


def token(index: int) -> common_pb2.Token:
    return common_pb2.Token(id=_FIRST_ID + index % _IDS)


async def job_of(requests: AsyncIterator[Any]) -> Any:
    """The job; a call that is given up before it has said anything is only cancelled."""
    async for request in requests:
        return request.job
    raise asyncio.CancelledError


class Ticks:
    """Wakes everybody at once, `rate` times a second."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._next = asyncio.Event()

    async def wait(self) -> None:
        if self._rate:
            await self._next.wait()

    async def run(self) -> None:
        while self._rate:
            await asyncio.sleep(1 / self._rate)
            self._next.set()
            self._next = asyncio.Event()


class Encode(encode_pb2_grpc.EncodeServicer):
    """Has every picture's rows at once."""

    async def Run(  # type: ignore[override]
        self, requests: AsyncIterator[encode_pb2.EncodeRequest], context: Any
    ) -> None:
        job = await job_of(requests)
        handle = common_pb2.Handle(contract=common_pb2.Contract(nonce=job.nonce))
        ready = encode_pb2.ItemReady(index=job.item.index, handle=handle)
        await context.write(encode_pb2.EncodeEvent(ready=ready))
        async for _ in requests:  # until the gateway ends the lease
            pass


class Prefill(prefill_pb2_grpc.PrefillServicer):
    """Admits, takes every picture's rows, announces one run of blocks, gives a token."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    async def Run(  # type: ignore[override]
        self, requests: AsyncIterator[prefill_pb2.PrefillRequest], context: Any
    ) -> None:
        job = await job_of(requests)
        total = len(job.token_ids)
        event = prefill_pb2.PrefillEvent
        missing = range(len(job.items))
        admitted = prefill_pb2.Admitted(position_delta=0, missing_items=missing)
        await context.write(event(admitted=admitted))
        for _ in missing:
            index = (await anext(requests)).embedding_ready.index
            fetched = prefill_pb2.EmbeddingFetched(index=index)
            await context.write(event(embedding_fetched=fetched))
        if job.decode_follows:
            ready = prefill_pb2.KvReady(first_block=0, tokens=total)
            await context.write(event(kv_ready=ready))
        given = prefill_pb2.FirstToken(token=token(0), kv_tokens=total)
        await context.write(event(first_token=given))
        async for request in requests:
            if request.HasField("cancel"):
                terminal = common_pb2.ReadsTerminal(clean=True)
                await context.write(event(reads_terminal=terminal))


class Decode(decode_pb2_grpc.DecodeServicer):
    """One token a tick."""

    def __init__(self, tokens: int, ticks: Ticks) -> None:
        self._tokens = tokens
        self._ticks = ticks

    async def Run(  # type: ignore[override]
        self, requests: AsyncIterator[decode_pb2.DecodeRequest], context: Any
    ) -> None:
        job = await job_of(requests)
        event = decode_pb2.DecodeEvent
        await context.write(event(admitted=decode_pb2.DecodeAdmitted()))
        await context.write(event(kv_fetched=decode_pb2.KvFetched()))
        async for request in requests:
            if request.HasField("cancel"):
                await context.write(event(reads_terminal=common_pb2.ReadsTerminal(clean=True)))
                return
            if request.HasField("start"):
                break
        length = min(self._tokens, job.sampling.max_tokens)
        reason = common_pb2.FINISH_REASON_LENGTH
        for index in range(1, length):
            await self._ticks.wait()
            tokens = decode_pb2.Tokens(first_index=index, tokens=[token(index)])
            if index + 1 == length:
                tokens.finish_reason = reason
            await context.write(event(tokens=tokens))
        finished = decode_pb2.Finished(reason=reason, output_tokens=length)
        await context.write(event(finished=finished))


async def join(membership: str, hello: membership_pb2.Hello) -> None:
    async with grpc.aio.insecure_channel(membership, GRPC_OPTIONS) as channel:
        call = membership_pb2_grpc.MembershipStub(channel).Join()
        await call.write(membership_pb2.WorkerReport(hello=hello))
        reply: Any = await call.read()
        if reply.HasField("refused"):
            raise SystemExit(f"the gateway refused the engine: {reply.refused.reason}")
        while True:
            await asyncio.sleep(0.5)
            beat = membership_pb2.Heartbeat(serving=True)
            await call.write(membership_pb2.WorkerReport(heartbeat=beat))


async def main(membership: str, fingerprint: str, tokens: int, rate: float) -> None:
    ticks = Ticks(rate)
    services = ["epd.v1.Encode", "epd.v1.Prefill", "epd.v1.Decode"]
    server = Server("engine", services, RpcConfig(), 32 << 20)
    encode_pb2_grpc.add_EncodeServicer_to_server(Encode(), server.grpc)
    prefill_pb2_grpc.add_PrefillServicer_to_server(Prefill(tokens), server.grpc)
    decode_pb2_grpc.add_DecodeServicer_to_server(Decode(tokens, ticks), server.grpc)
    address = await server.start("127.0.0.1", 0)
    await server.set_serving(True)
    hello = membership_pb2.Hello(
        stages=[
            membership_pb2.STAGE_ENCODE,
            membership_pb2.STAGE_PREFILL,
            membership_pb2.STAGE_DECODE,
        ],
        address=address,
        epoch=1,
        fingerprint=fingerprint,
        dtype=DTYPE,
        kv_layout="kv-block-major/1",
        kv_block_shape=[1],
        version=__version__,
    )
    print(f"READY {json.dumps({'grpc': address})}", flush=True)
    await asyncio.gather(ticks.run(), join(membership, hello))


if __name__ == "__main__":
    die_with_expected_parent()
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
