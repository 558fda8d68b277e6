"""Every HTTP request has an id and a line in the access log, whatever becomes of it."""

from __future__ import annotations

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from epd.obs import logs
from gateway.ids import id_headers, new_request_id

_log = logging.getLogger(__name__)
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version"})
"""For probes and scrapers, which have no keys, and of whose reading nobody wants lines."""


class RequestLog:
    """ASGI, outermost: names each request, says the name with every answer to it, refusals
    and browsers' preflights too, and writes one line about it, without contents."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.monotonic(), 0
        method, path = scope["method"], scope["path"]
        state = scope.setdefault("state", {})
        state["request_id"] = new_request_id(path)
        state["key"] = "?"
        with logs.bind(state["request_id"]):
            shown = [
                (name.encode(), value.encode())
                for name, value in id_headers(state["request_id"], _said(scope)).items()
            ]

            async def watched(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                    message = {**message, "headers": [*message.get("headers", ()), *shown]}
                await send(message)

            try:
                await self._app(scope, receive, watched)
            finally:
                if path not in OPEN_PATHS or method not in ("GET", "HEAD"):
                    write_line(method, path, status, started, state["key"])


def _said(scope: Scope) -> str:
    """What the client calls its request."""
    found = (value for name, value in scope["headers"] if name == b"x-request-id")
    return next(found, b"").decode("latin-1")


def write_line(method: str, path: str, status: int | str, started: float, name: str) -> None:
    """One call in the access log. `started` is of `time.monotonic`; `name` is the key's."""
    extra = {
        "method": method,
        "path": path,
        "status": status,
        "ms": round((time.monotonic() - started) * 1e3, 1),
        "key": name,
    }
    _log.info("access", extra=extra)
