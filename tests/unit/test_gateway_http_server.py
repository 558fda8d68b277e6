"""The HTTP port's sockets, and what is hidden from its parser."""

from __future__ import annotations

import asyncio
import socket

from fastapi import FastAPI

from epd.config import GatewayConfig
from gateway.http_protocol import _without_upgrade
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


def test_an_offer_of_another_protocol_is_hidden_however_the_head_is_cut() -> None:
    head = b"POST / HTTP/1.1\r\nHost: a\r\nupgradE: h2c\r\nUp: b\r\nX-Upgrade: c\r\n\r\n"
    hidden = head.replace(b"upgradE:", b"Ignored:")
    for first in range(len(head)):
        for second in (first + 1, first + 4, len(head)):
            pieces, held = (head[:first], head[first:second], head[second:]), b""
            shown = b""
            for piece in pieces:
                data, held = _without_upgrade(held + piece)
                shown += data
            assert (shown, held) == (hidden, b"")


def test_no_more_of_a_head_is_held_back_than_the_name() -> None:
    for piece in (b"a: b", b"a: b\r\nUpgraded: c", b"a: b\r\nU: ", b"a: Upgrade"):
        assert _without_upgrade(piece) == (piece, b"")
    assert _without_upgrade(b"a: b\r\nUPG") == (b"a: b", b"\r\nUPG")
