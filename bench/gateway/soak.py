"""Nothing grows: cancelled streams by the ten thousand, and streams to a dead server.

    python -m bench.gateway.soak --cancelled 50000 --dead 20000

First, clients open gRPC streams at a real gateway process over a scripted engine and cancel
them after their first event. Then `epd.client` and the gateway's own calls keep opening
streams to addresses where nobody listens. Memory is compared after a tenth of each, when
caches are full, and at the end. Exit code 1 where it grew by more than `--most` MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import time

import grpc.aio
import psutil

from bench.gateway.processes import engine, gateway
from bench.loopback import GRPC_OPTIONS
from epd.client import AsyncClient, Client, user
from epd.config import RpcConfig
from epd.errors import EpdError
from epd.jobs import Stage
from gateway.streams import Connections, StageFault
from gateway.worker import Card, Worker
from protos.epd.v1 import gateway_pb2 as pb
from protos.epd.v1 import gateway_pb2_grpc

_SIDE_BY_SIDE = 16
_DEAD = "127.0.0.1:1"
MIB = 1 << 20


def rss(process: psutil.Process) -> float:
    gc.collect()
    return float(process.memory_info().rss) / MIB


class Growth:
    """Memory of a process between the first tenth of some work and its end."""

    def __init__(self, what: str, process: psutil.Process, total: int) -> None:
        self._what = what
        self._process = process
        self._total = total
        self._tenths: list[float] = []
        self._started = time.monotonic()

    def done(self, count: int) -> None:
        if count % max(1, self._total // 10) == 0 and count:
            self._tenths.append(rss(self._process))

    def report(self) -> float:
        self._tenths.append(rss(self._process))
        took = time.monotonic() - self._started
        series = " ".join(f"{size:.0f}" for size in self._tenths)
        print(f"{self._what}: {self._total} in {took:.0f} s, MiB {series}", flush=True)
        return self._tenths[-1] - self._tenths[0]


async def cancelled(address: str, gateway: psutil.Process, total: int) -> float:
    """Streams that are cancelled after their first event."""
    growth = Growth("cancelled streams, the gateway", gateway, total)
    request = pb.ChatRequest(messages=[user("Count.")])
    request.options.max_tokens = 64
    count = 0

    async def some(stub: gateway_pb2_grpc.GatewayAsyncStub) -> None:
        nonlocal count
        while count < total:
            count += 1
            growth.done(count)
            call = stub.Chat(request)
            await call.read()
            call.cancel()

    async with grpc.aio.insecure_channel(address, GRPC_OPTIONS) as channel:
        stub = gateway_pb2_grpc.GatewayStub(channel)
        await asyncio.gather(*(some(stub) for _ in range(_SIDE_BY_SIDE)))
    await asyncio.sleep(3)  # teardowns
    return growth.report()


async def dead_async(total: int) -> float:
    growth = Growth("AsyncClient, dead server", psutil.Process(), total)
    async with AsyncClient(_DEAD, timeout_s=5) as client:
        for number in range(total):
            growth.done(number)
            try:
                await client.chat([user("a")])
            except EpdError:
                continue
            raise SystemExit("somebody listens at port 1")
    return growth.report()


def dead_sync(total: int) -> float:
    growth = Growth("Client, dead server", psutil.Process(), total)
    with Client(_DEAD, timeout_s=5) as client:
        for number in range(total):
            growth.done(number)
            try:
                client.chat([user("a")])
            except EpdError:
                continue
            raise SystemExit("somebody listens at port 1")
    return growth.report()


async def dead_stage(total: int) -> float:
    """What a gateway does whose stage is gone: `StageStream`s that fail."""
    growth = Growth("the gateway's own calls, dead stage", psutil.Process(), total)
    connections = Connections(RpcConfig())
    card = Card(_DEAD, 1, frozenset({Stage.PREFILL}), fingerprint="", dtype="")
    worker = Worker(card, last_seen=0.0)
    for number in range(total):
        growth.done(number)
        stream = connections.open(Stage.PREFILL, worker, 5.0, "soak")
        try:
            await stream.next()
        except StageFault:
            await stream.settle(1.0)
    assert not worker.streams
    await connections.close()
    return growth.report()


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.gateway.soak")
    parser.add_argument("--cancelled", type=int, default=50_000)
    parser.add_argument("--dead", type=int, default=20_000)
    parser.add_argument("--most", type=float, default=24.0, help="MiB that may be grown")
    options = parser.parse_args()
    grown = [
        dead_sync(options.dead),
        asyncio.run(dead_async(options.dead)),
        asyncio.run(dead_stage(options.dead)),
    ]
    with gateway() as (server, addresses), engine(addresses, 64, 20):
        grown.append(asyncio.run(cancelled(addresses["grpc"], server, options.cancelled)))
    return int(max(grown) > options.most)


if __name__ == "__main__":
    sys.exit(main())
