"""A peer whose kernel still takes what we send, and that itself answers nothing any more: its
process hangs, or its end of the connection is long gone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest

from epd.config import RpcConfig
from epd.rpc.channels import dial
from epd.rpc.server import Server
from protos.epd.v1 import decode_pb2_grpc
from tests.waiting import soon, until

CONFIG = RpcConfig(keepalive_s=1)
A_MINUTE = "gRPC's own minute for an answer to a ping"

# HTTP/2, RFC 9113 and 7541: frames are length, type, flags, stream, payload.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADERS, _SETTINGS, _PING = 1, 4, 6
_ACK, _END_HEADERS = 1, 4
_POST, _HTTP, _AUTHORITY, _PATH = b"\x83", b"\x86", b"\x01", b"\x04"
_CONTENT_TYPE, _OTHER = b"\x0f\x10", b"\x00"


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    head = len(payload).to_bytes(3) + bytes([kind, flags])
    return head + stream.to_bytes(4) + payload


def literal(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


def call_of(path: str) -> bytes:
    """The beginning of a call, as the first stream of a connection."""
    block = _POST + _HTTP + _AUTHORITY + literal("peer") + _PATH + literal(path)
    block += _CONTENT_TYPE + literal("application/grpc") + _OTHER + literal("te")
    return frame(_HEADERS, _END_HEADERS, 1, block + literal("trailers"))


class Frames:
    """What comes over a connection; SETTINGS are taken, and nothing else is answered."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.kinds: list[int] = []
        self.over = asyncio.Event()
        self._reader, self._writer = reader, writer

    async def take(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await self._reader.readexactly(9)
                await self._reader.readexactly(int.from_bytes(head[:3]))
                kind, flags = head[3], head[4]
                self.kinds.append(kind)
                if kind == _SETTINGS and not flags & _ACK:
                    self._writer.write(frame(_SETTINGS, _ACK))
        self.over.set()
        self._writer.close()


class Held(decode_pb2_grpc.DecodeServicer):
    """Calls that wait for ever; they are counted."""

    def __init__(self) -> None:
        self.open = self.ended = 0

    async def Run(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        self.open += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.open -= 1
            self.ended += 1


@asynccontextmanager
async def holding() -> AsyncIterator[tuple[str, Held]]:
    server, held = Server("decode", ["epd.v1.Decode"], CONFIG, 1 << 20), Held()
    decode_pb2_grpc.add_DecodeServicer_to_server(held, server.grpc)
    try:
        yield await server.start("127.0.0.1", 0), held
    finally:
        await server.stop(0)


async def test_a_worker_gives_up_the_calls_of_a_silent_gateway() -> None:
    """They hold its memory; the deadline of the request may be minutes away."""
    async with holding() as (address, held):
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        frames = Frames(reader, writer)
        taking = asyncio.create_task(frames.take())
        writer.write(_PREFACE + frame(_SETTINGS) + call_of("/epd.v1.Decode/Run"))
        await until(lambda: held.open)
        with soon(30, instead_of=A_MINUTE):
            await until(lambda: held.ended)
            await frames.over.wait()
        assert _PING in frames.kinds
        await taking


@asynccontextmanager
async def silent(frames: Callable[[Frames], None]) -> AsyncIterator[str]:
    """A server that takes connections and calls."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(_PREFACE))
        writer.write(frame(_SETTINGS))
        found = Frames(reader, writer)
        frames(found)
        await found.take()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def test_a_gateway_gives_up_its_calls_to_a_silent_worker() -> None:
    found: list[Frames] = []
    async with silent(found.append) as address, dial(address, CONFIG) as channel:
        call = decode_pb2_grpc.DecodeStub(channel).Run()
        with soon(30, instead_of=A_MINUTE), pytest.raises(grpc.aio.AioRpcError) as ended:
            await call.read()
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert _PING in found[0].kinds
        await found[0].over.wait()


def user_timeouts(port: str) -> dict[bool, int]:
    """Milliseconds that the kernel keeps unacknowledged bytes, by whether it is the server's
    end of a connection to that port; of this process's connections."""
    found = {}
    for known in psutil.Process().net_connections("tcp"):
        if known.status != psutil.CONN_ESTABLISHED or int(port) not in (
            known.laddr.port,
            known.raddr.port,
        ):
            continue
        with socket.socket(fileno=os.dup(known.fd)) as end:
            kept = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        found[known.laddr.port == int(port)] = kept
    return found


async def test_last_words_outlive_the_cut_that_they_are_said_in() -> None:
    """A gateway gives up its calls within `gateway.dead_s` of a cut, and the worker, which
    holds memory for them, hears of it when the network is back. A worker's own bytes are
    not waited for as long: its gateway holds nothing."""
    async with holding() as (address, held), dial(address, CONFIG) as channel:
        call = decode_pb2_grpc.DecodeStub(channel).Run()
        await until(lambda: held.open)
        kept = user_timeouts(address.rpartition(":")[2])
        call.cancel()
        await until(lambda: held.ended)
    assert kept == {False: 2000, True: 500}
