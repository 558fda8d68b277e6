"""The HTTP port: uvicorn on a socket of our own, with bounds on its connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from epd.addresses import joined
from epd.config import GatewayConfig
from epd.errors import invalid
from gateway import tls
from gateway.http_protocol import BoundedProtocol, Bounds, bounded

STOP_S = 1.0
_SWEEPS_S = 1.0
_KEEP_ALIVE_S = 30
"""Connections that wait for their client's next request."""


class _Uvicorn(uvicorn.Server):
    """Signals are the process's, not the HTTP server's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """`start`, then `stop`. Port 0 is any free one; failures are typed."""

    def __init__(self, app: ASGIApp, config: GatewayConfig) -> None:
        self._socket = _listen(config.host, config.http_port)
        bound = self._socket.getsockname()
        self.address = joined(config.host, bound[1])
        self._bounds = Bounds(
            config.max_connections, config.head_s, config.head_bytes, config.slow_reader_s
        )
        self._server = _Uvicorn(
            uvicorn.Config(
                app,
                http=bounded(self._bounds),
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                proxy_headers=False,  # nothing here goes by the client's address or scheme
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(STOP_S),
                **tls.http_options(config),
            )
        )
        self._task: asyncio.Task[None] | None = None
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def connections(self) -> int:
        return len(self._server.server_state.connections)

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.005)
        if self._task.done():
            self._task.result()
        self._sweeper = asyncio.create_task(self._sweep_forever())

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """That work as long as it serves."""
        return [task for task in (self._task, self._sweeper) if task is not None]

    async def _sweep_forever(self) -> None:
        every = min(_SWEEPS_S, self._bounds.head_s / 4, self._bounds.slow_reader_s / 4)
        while True:
            await asyncio.sleep(every)
            now = asyncio.get_running_loop().time()
            for connection in list(self._server.server_state.connections):
                assert isinstance(connection, BoundedProtocol)
                connection.sweep(now)

    async def stop(self) -> None:
        """Open streams get a second, then they are cut."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.wait([self._task])
        self._socket.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Protocol 0 is TCP too, but asyncio sets TCP_NODELAY only where it is said: without it a
    # kept connection's first tokens wait 40 ms for the client's delayed ACK.
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        found.listen(1024)
    except OSError as error:
        found.close()
        key = "gateway.http_port"
        raise invalid(f"{key}: can't listen on {host}:{port}: {error.strerror}", key) from error
    return found
