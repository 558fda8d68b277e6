"""A channel to a peer whose machine is crowded."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from epd.config import RpcConfig
from epd.rpc.channels import dial
from epd.rpc.server import Server


@asynccontextmanager
async def late(address: str, wait_s: float) -> AsyncIterator[str]:
    """Takes connections at once, and passes bytes on after `wait_s`."""
    host, _, port = address.rpartition(":")
    carrying: set[asyncio.Task[None]] = set()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(wait_s)
        there, back = await asyncio.open_connection(host, int(port))
        for pair in ((reader, back), (there, writer)):
            carrying.add(asyncio.create_task(carry(*pair)))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in carrying:
            task.cancel()


async def test_no_proxy_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    server = Server("decode", ["epd.v1.Decode"], RpcConfig(), 1 << 20)
    address = await server.start("127.0.0.1", 0)
    await server.set_serving(True)
    try:
        async with dial(address, RpcConfig()) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        await server.stop(0)


@pytest.mark.parametrize("wait_s", [0.0, 1.5])
async def test_a_first_call_waits_for_a_slow_handshake(wait_s: float) -> None:
    server = Server("decode", ["epd.v1.Decode"], RpcConfig(), 1 << 20)
    address = await server.start("127.0.0.1", 0)
    await server.set_serving(True)
    try:
        async with late(address, wait_s) as crowded, dial(crowded, RpcConfig()) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        await server.stop(0)
