"""GET /metrics (prometheus), /health, /ready and /debug/state (JSON) of one process.

A few lines of HTTP/1.0 instead of a web framework: four fixed answers, no input
but the path, served on the loop that works.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

import orjson
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from epd.addresses import joined
from epd.errors import invalid
from epd.obs import metrics

State = Callable[[], Mapping[str, object]]
_TIMEOUT_S = 5.0
_MAX_LINE = 4096
_HEAD_END = b"\r\n\r\n"


class ObservationServer:
    """`state()` gives the live counts, those of several stages under `stages`; numbers
    among them become gauges. `why_not()` says
    why nothing can be served now; "": it can."""

    def __init__(self, stage: str, state: State, why_not: Callable[[], str]) -> None:
        self._stage = stage
        self._state = state
        self._why_not = why_not
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int, key: str = "worker.metrics_port") -> str:
        """Listen; returns "host:port" with the real port. `key` of the configuration has it.

        Raises:
            EpdError: the address is in use or not ours.
        """
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=_MAX_LINE)
        except OSError as error:
            raise invalid(f"{key}: can't listen on {host}:{port}: {error.strerror}", key) from error
        return joined(host, self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A scraper that goes away or sends nonsense concerns nobody else.
        gone = (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError)
        with contextlib.closing(writer), contextlib.suppress(*gone):
            async with asyncio.timeout(_TIMEOUT_S):
                line = await reader.readline()
                while (await reader.readline()).strip():
                    pass
                method, _, rest = line.decode("latin-1").partition(" ")
                head, end, body = self._answer(method, rest.split(" ")[0]).partition(_HEAD_END)
                writer.write(head + end + (b"" if method == "HEAD" else body))
                await writer.drain()

    def _answer(self, method: str, target: str) -> bytes:
        # Probes ask with HEAD as well.
        path = target.split("?")[0].strip() if method in ("GET", "HEAD") else ""
        if path == "/metrics":
            self._set_gauges()
            return _response("200 OK", CONTENT_TYPE_LATEST, generate_latest())
        if path == "/debug/state":
            body = orjson.dumps(dict(self._state()), option=orjson.OPT_NON_STR_KEYS)
            return _response("200 OK", "application/json", body)
        if path == "/health":  # that it answers is the answer
            return _response("200 OK", "text/plain", b"alive\n")
        if path == "/ready":
            reason = self._why_not()
            status = "503 Service Unavailable" if reason else "200 OK"
            return _response(status, "text/plain", f"{reason or 'ready'}\n".encode())
        return _response(
            "404 Not Found", "text/plain", b"/metrics, /health, /ready or /debug/state\n"
        )

    def _set_gauges(self) -> None:
        state = self._state()
        stages = state.get("stages")
        each = stages if isinstance(stages, dict) else {self._stage: state}
        for stage, counts in each.items():
            for what, value in counts.items():
                if isinstance(value, (int, float)):
                    metrics.STATE.labels(stage, what).set(value)


def _response(status: str, content_type: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.0 {status}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
