"""A server that answers every chat with the same events as fast as it is read: it shows
what the client can take, and what a gateway adds in front of an engine that costs nothing.

    python -m epd.bench.scripted [--events 512] [--first-s 0] [--gap-s 0]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

import orjson
from aiohttp import web

MODEL = "scripted"


def events(count: int) -> list[bytes]:
    """An answer as OpenAI's API streams it: a role, `count` tokens, the end, usage."""
    usage = {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": count + 1}
    return [
        _event([{"index": 0, "delta": {"role": "assistant", "content": ""}}]),
        *(_event([{"index": 0, "delta": {"content": f" {n}"}}]) for n in range(count)),
        _event([{"index": 0, "delta": {}, "finish_reason": "stop"}]),
        _event([], usage=usage),
        b"data: [DONE]\n\n",
    ]


def _event(choices: list[dict[str, Any]], **more: Any) -> bytes:
    chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0, "model": MODEL}
    return b"data: " + orjson.dumps({**chunk, "choices": choices, **more}) + b"\n\n"


def build(count: int, first_s: float, gap_s: float) -> web.Application:
    """One write an event, so that the client is woken as often as by a real server."""
    answer = events(count)

    async def chat(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if first_s:
            await asyncio.sleep(first_s)
        for event in answer:
            await response.write(event)
            await asyncio.sleep(gap_s)
        return response

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    app = web.Application(client_max_size=64 << 20)
    app.add_routes([web.post("/v1/chat/completions", chat), web.get("/v1/models", models)])
    return app


async def serve(count: int, first_s: float, gap_s: float) -> None:
    """On a free port of loopback, whose URL is printed, until stdin ends."""
    runner = web.AppRunner(build(count, first_s, gap_s))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=512)
    parser.add_argument("--first-s", type=float, default=0.0)
    parser.add_argument("--gap-s", type=float, default=0.0)
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.events, arguments.first_s, arguments.gap_s))


if __name__ == "__main__":
    main()
