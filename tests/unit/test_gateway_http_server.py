"""The HTTP port's sockets, and requests that one connection sends at once."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock, call

import pytest
import uvicorn
from fastapi import FastAPI
from uvicorn.server import ServerState

from epd.config import GatewayConfig
from gateway.http_protocol import BoundedProtocol, Bounds, _Joined, bounded
from gateway.http_server import HttpServer
from tests.waiting import until


async def test_small_writes_leave_at_once() -> None:
    """Without TCP_NODELAY tokens wait for the client's delayed ACK, 40 ms on Linux."""
    server = HttpServer(FastAPI(), GatewayConfig(http_port=0))
    await server.start()
    host, _, port = server.address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    await until(lambda: server.connections)
    try:
        (connection,) = server._server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    finally:
        writer.close()
        await server.stop()


class Wire(asyncio.Transport):
    """Where a connection writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self._closed = b"", False
        self.writes: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self._closed
        self.written += data
        self.writes.append(bytes(data))

    def close(self) -> None:
        self._closed = True

    abort = close

    def is_closing(self) -> bool:
        return self._closed

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Path and body, and who offers what."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message.get("more_body", False)
    offers = b"".join(value for name, value in scope["headers"] if name == b"upgrade")
    said = b"[%b %b%b]" % (scope["path"].encode(), body, offers)
    length = (b"content-length", b"%d" % len(said))
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": said})


def connected(app: Any = echo) -> tuple[BoundedProtocol, Wire]:
    """A connection to `app`, and what it writes to."""
    bounds = Bounds(connections=1, head_s=9.0, head_bytes=1 << 10, slow_reader_s=9.0)
    config, wire = uvicorn.Config(app, ws="none", log_config=None), Wire()
    config.load()
    connection = bounded(bounds)(config, ServerState(), {})
    connection.connection_made(wire)
    return connection, wire


async def answered(pieces: Sequence[bytes], count: int) -> bytes:
    """All that one connection is answered to these, which come apart."""
    connection, wire = connected()
    for piece in pieces:
        connection.data_received(piece)
    await until(lambda: wire.written.count(b"]") == count or wire.is_closing())
    connection.connection_lost(None)
    return wire.written


async def echoed(pieces: Sequence[bytes]) -> bytes:
    return b"".join(re.findall(rb"\[.*?\]", await answered(pieces, len(PIPELINED)), re.DOTALL))


OFFER = b"Host: a\r\nConnection: keep-alive, Upgrade\r\nupgradE: h2c\r\nX-Upgrade: c\r\n"
PIPELINED = [
    b"POST /1 HTTP/1.1\r\n" + OFFER + b"Content-Length: 3\r\n\r\nabc",
    b"GET /2 HTTP/1.1\r\n" + OFFER + b"\r\n",
    b"POST /3 HTTP/1.1\r\n" + OFFER + b"Transfer-Encoding: chunked\r\n\r\n2\r\nde\r\n0\r\n\r\n",
    b"POST /4 HTTP/1.1\r\nHost: a\r\nContent-Length: 14\r\n\r\n\r\nUpgrade: h2c",
    b"GET /5 HTTP/1.1\r\n" + OFFER + b"\r\n",
    b"GET /6 HTTP/1.1\r\nHost: a\r\n\r\n",
    b"POST /7 HTTP/1.1\r\n" + OFFER + b"Connection: close\r\nContent-Length: 2\r\n\r\nfg",
]
ANSWERS = b"[/1 abc][/2 ][/3 de][/4 \r\nUpgrade: h2c][/5 ][/6 ][/7 fg]"


async def test_an_offer_of_another_protocol_is_ignored_wherever_it_stands() -> None:
    """With a body or without, and nothing of what comes behind it is lost."""
    stream = b"".join(PIPELINED)
    assert await echoed([stream]) == ANSWERS
    assert await echoed([bytes([byte]) for byte in stream]) == ANSWERS
    for cut in range(1, len(stream)):
        assert await echoed([stream[:cut], stream[cut:]]) == ANSWERS


async def test_who_wants_a_tunnel_is_refused() -> None:
    """The parser stops there as it does behind an offer."""
    connect = b"CONNECT a:1 HTTP/1.1\r\n" + OFFER + b"\r\n"
    assert b" 400 " in await answered([connect + PIPELINED[5]], 2)


GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


def streamed(go: asyncio.Event | None = None) -> Any:
    """An answer in two chunks; `go`: the first comes only then."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if go is not None:
            await go.wait()
        for more in (b"first", b"second"):
            await send({"type": "http.response.body", "body": more, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return app


async def test_a_head_goes_out_with_the_beginning_of_its_body() -> None:
    """Alone it wakes the client, whose turn on the core the first token waits for."""
    connection, wire = connected(streamed())
    connection.data_received(GET)
    await until(lambda: wire.written.endswith(b"0\r\n\r\n"))
    first, second, *_ = wire.writes
    assert first.startswith(b"HTTP/1.1 200 OK\r\n")
    assert first.endswith(b"\r\n\r\n5\r\nfirst\r\n")
    assert second == b"6\r\nsecond\r\n"


async def test_a_head_that_nothing_follows_waits_for_nothing() -> None:
    go = asyncio.Event()
    connection, wire = connected(streamed(go))
    connection.data_received(GET)
    await until(lambda: wire.writes)
    assert wire.written.startswith(b"HTTP/1.1 200 OK\r\n")
    assert wire.written.endswith(b"\r\n\r\n")
    go.set()
    await until(lambda: wire.written.endswith(b"0\r\n\r\n"))
    assert wire.writes[1] == b"5\r\nfirst\r\n"


async def test_a_head_on_its_way_to_a_client_that_left_is_dropped() -> None:
    connection, wire = connected(streamed(asyncio.Event()))
    connection.data_received(GET)
    (task,) = connection.tasks
    await asyncio.sleep(0)  # it has its head
    wire.close()
    connection.connection_lost(None)
    await asyncio.sleep(0)
    assert not wire.writes
    task.cancel()


CALLS: dict[str, tuple[Any, ...]] = {
    "get_extra_info": ("peername",),
    "set_protocol": (asyncio.Protocol(),),
    "writelines": ([b"a", b"b"],),
}
"""What is called with arguments."""
MORE = [
    name
    for name in dir(asyncio.Transport)
    if not name.startswith("_") and name not in ("write", "is_closing")
]


@pytest.mark.parametrize("name", MORE)
async def test_whatever_else_a_transport_does_comes_behind_the_head(name: str) -> None:
    """uvicorn writes, closes and asks whether it is closed; it may come to do more."""
    transport = Mock(asyncio.Transport, **{"is_closing.return_value": False})
    joined = _Joined(transport, asyncio.get_running_loop())
    joined.write(b"HTTP/1.1 200 OK\r\n\r\n")
    assert transport.write.mock_calls == []
    getattr(joined, name)(*CALLS.get(name, ()))
    behind = [made for made in transport.mock_calls if made != call.is_closing()]
    made = getattr(call, name)(*CALLS.get(name, ()))
    assert behind == [call.write(b"HTTP/1.1 200 OK\r\n\r\n"), made]
    await asyncio.sleep(0)
    assert len(transport.write.mock_calls) == 1


async def test_an_answer_without_a_body_goes_out_before_what_is_said_of_the_next_request() -> None:
    connection, wire = connected()
    connection.data_received(GET.replace(b"GET", b"HEAD"))
    await asyncio.sleep(0)  # it is answered
    connection.data_received(b"\0")
    assert re.findall(rb"HTTP/1.1 (\d+)", wire.written) == [b"200", b"400"]


async def test_who_asks_whether_to_send_is_told_before_the_answer() -> None:
    connection, wire = connected()
    connection.data_received(
        b"POST /1 HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
    )
    await until(lambda: wire.writes)
    assert wire.writes == [b"HTTP/1.1 100 Continue\r\n\r\n"]
    connection.data_received(b"ab")
    await until(lambda: wire.written.endswith(b"[/1 ab]"))


async def test_a_last_answer_is_written_before_its_connection_closes() -> None:
    connection, wire = connected()
    connection.data_received(b"GET /1 HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    await until(wire.is_closing)
    assert wire.written.startswith(b"HTTP/1.1 200 OK\r\n")
    assert wire.written.endswith(b"[/1 ]")
    assert len(wire.writes) == 1
