"""Clients that take their answer byte by byte: cut off in time, and nothing is kept for them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc
import grpc.aio
import psutil
import pytest

from epd.jobs import Stage
from epd.rpc import server as rpc_server
from gateway.checkpoint import Loaded
from protos.epd.v1 import gateway_pb2_grpc
from tests.e2e.gateway_house import House, ask_much, long_answer, opened, raw
from tests.e2e.test_gateway_bounds import POST, server
from tests.waiting import LIMIT_S, promised, soon, until

MIB = 1 << 20
_FIRST = 4096
"""Bytes that pass at once: beginnings of connections."""


async def trickle(peer: socket.socket, every_s: float) -> int:
    """Read a byte now and then until the connection is gone; how many there were."""
    loop, read = asyncio.get_running_loop(), 0
    with suppress(OSError):
        while await loop.sock_recv(peer, 1):
            read += 1
            await asyncio.sleep(every_s)
    return read


@asynccontextmanager
async def asked(house: House, **fields: object) -> AsyncIterator[socket.socket]:
    """A client with hardly any buffer that has asked for a very long answer."""
    peer = socket.socket()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, port = house.http.split(":")
    peer.setblocking(False)
    body = raw(logprobs=True, top_logprobs=20, max_tokens=900, **fields)
    try:
        await asyncio.get_running_loop().sock_connect(peer, (host, int(port)))
        await asyncio.get_running_loop().sock_sendall(
            peer, POST + b"content-length: %d\r\n\r\n" % len(body) + body
        )
        yield peer
    finally:
        peer.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_byte_now_and_then_is_nothing(loaded: Loaded, stream: bool) -> None:
    """Twenty a second, for an answer of megabytes: given up after `slow_reader_s`."""
    async with opened(loaded, {"default_max_tokens": 4096}, slow_reader_s=1.0) as house:
        made = long_answer(house, 60_000 if stream else 6000)
        before = psutil.Process().memory_info().rss
        async with asked(house, stream=stream) as peer:
            reading = asyncio.create_task(trickle(peer, 0.05))
            await until(lambda: house.script.jobs_of(Stage.DECODE))
            with soon(promised(20), instead_of="slow_reader_s as it is by default"):
                await until(lambda: not house.gateway.service.inflight)
                await until(lambda: not server(house).connections)
            assert not stream or 0 < made[0] < 60_000 * 0.9, "nobody held decode back"
            reading.cancel()
        assert psutil.Process().memory_info().rss - before < 96 * MIB


async def test_who_takes_some_all_the_time_is_cut_at_the_deadline(loaded: Loaded) -> None:
    """Never stalled for long, never done."""
    limits = {"request_deadline_s": 3.0}
    async with opened(loaded, limits, slow_reader_s=60.0) as house:
        long_answer(house, 60_000)
        async with asked(house, stream=True) as peer:
            reading = asyncio.create_task(trickle(peer, 0.01))
            await until(lambda: house.script.jobs_of(Stage.DECODE))
            await until(lambda: not house.gateway.service.inflight)
            with soon(promised(30), instead_of="slow_reader_s"):
                await until(lambda: not server(house).connections)
            reading.cancel()


# --- gRPC ------------------------------------------------------------------------------------


class Thin:
    """A way to the gateway that lets a byte now and then come back."""

    def __init__(self, address: str, every_s: float) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._every_s = every_s

    async def serve(self, client: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        thin = socket.socket()
        thin.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        thin.connect((self._host, self._port))
        reader, writer = await asyncio.open_connection(sock=thin, limit=4096)
        ways = {
            asyncio.create_task(_copy(client, writer)),
            asyncio.create_task(self._trickle(reader, back)),
        }
        _, left = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in left:
            way.cancel()
        writer.close()
        back.close()

    async def _trickle(self, reader: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        done = 0
        with suppress(OSError):
            while data := await reader.read(1 if done > _FIRST else 64):
                back.write(data)
                done += len(data)
                if done > _FIRST:
                    await asyncio.sleep(self._every_s)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()


async def test_a_byte_now_and_then_is_nothing_over_grpc(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_server, "TAKEN_WITHIN_S", 0.5)
    async with opened(loaded, slow_reader_s=1.0) as house:
        request, made = ask_much(house, monkeypatch)
        way = Thin(house.grpc, 0.05)
        listening = await asyncio.start_server(way.serve, "127.0.0.1", 0)
        address = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        before = psutil.Process().memory_info().rss
        async with grpc.aio.insecure_channel(address) as channel:
            call = gateway_pb2_grpc.GatewayStub(channel).Chat(request, timeout=LIMIT_S)
            await until(lambda: house.script.jobs_of(Stage.DECODE))
            with soon(promised(30), instead_of="slow_reader_s as it is by default"):
                await until(lambda: not house.gateway.service.inflight)
            await house.settled()
            assert 0 < made[0] < 1400, "nobody held decode back"
            assert psutil.Process().memory_info().rss - before < 96 * MIB
            call.cancel()
        listening.close()
