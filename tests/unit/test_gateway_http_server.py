"""The HTTP port's sockets."""

from __future__ import annotations

import asyncio
import socket

from fastapi import FastAPI

from epd.config import GatewayConfig
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
        accepted = connection.transport.get_extra_info("socket")  # type: ignore[union-attr]
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    finally:
        writer.close()
        await server.stop()
