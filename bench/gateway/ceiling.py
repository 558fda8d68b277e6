"""The web stack's ceiling: the same uvicorn and protocol, sending events that are ready.

    python -m bench.gateway.ceiling TOKENS RATE

Answers any POST with TOKENS server-sent events of an answer's usual size, paced as the
scripted engine paces them. What a gateway needs on top of this is the gateway's.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from bench.gateway.engine import Ticks
from epd.config import GatewayConfig
from epd.lifetime import die_with_expected_parent
from gateway.http_server import HttpServer

EVENT = (
    b'data: {"id":"chatcmpl-000000000000000000000000","created":1700000000,"model":"checkpoint",'
    b'"object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":" word"},'
    b'"logprobs":null,"finish_reason":null}]}\n\n'
)
_HEADERS = [(b"content-type", b"text/event-stream")]


class App:
    """ASGI."""

    def __init__(self, tokens: int, ticks: Ticks) -> None:
        self._tokens = tokens
        self._ticks = ticks

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        for _ in range(self._tokens):
            await self._ticks.wait()
            await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def main(tokens: int, rate: float) -> None:
    ticks = Ticks(rate)
    server = HttpServer(App(tokens, ticks), GatewayConfig(http_port=0, max_connections=10_000))
    await server.start()
    print(f"READY {json.dumps({'http': server.address})}", flush=True)
    await ticks.run() if rate else await asyncio.Event().wait()


if __name__ == "__main__":
    die_with_expected_parent()
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
