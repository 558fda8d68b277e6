"""Many streaming clients in one process, cheap enough not to be what is measured."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field

_EVENT = b"data: {"
_DONE = b"data: [DONE]\n\n\r\n0\r\n\r\n"
BODY = {
    "messages": [{"role": "user", "content": "Count."}],
    "stream": True,
    "temperature": 0,
}


@dataclass
class Outcome:
    """Of one stream."""

    status: int = 0
    events: int = 0
    done: bool = False
    """The end mark came, and nothing after it."""
    sent: float = 0.0
    first: float = 0.0
    ended: float = 0.0
    error: str = ""


@dataclass
class Stream(asyncio.Protocol):
    """Counts events as they come; keeps no more than their last bytes."""

    request: bytes
    outcome: Outcome = field(default_factory=Outcome)

    def __post_init__(self) -> None:
        self.over = asyncio.get_running_loop().create_future()
        self._tail = self._end = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.outcome.sent = time.monotonic()
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        outcome = self.outcome
        if not outcome.status:
            outcome.status = int(data[9:12])
        seen = self._tail + data
        outcome.events += seen.count(_EVENT)
        self._tail = seen[1 - len(_EVENT) :]
        if outcome.events and not outcome.first:
            outcome.first = time.monotonic()
        self._end = (self._end + data)[-len(_DONE) :]
        outcome.done = self._end == _DONE

    def connection_lost(self, error: Exception | None) -> None:
        self.outcome.ended = time.monotonic()
        self.outcome.error = "" if error is None else repr(error)
        if not self.over.done():
            self.over.set_result(None)


def request(address: str, model: str, max_tokens: int) -> bytes:
    body = json.dumps({"model": model, "max_tokens": max_tokens, **BODY}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def run(address: str, raw: bytes, clients: int, ramp_s: float) -> list[Outcome]:
    """All streams to their ends; they begin over `ramp_s`."""
    loop = asyncio.get_running_loop()
    host, _, port = address.rpartition(":")
    outcomes: list[Outcome] = []

    async def one(number: int) -> None:
        await asyncio.sleep(ramp_s * number / clients)
        stream = Stream(raw)
        outcomes.append(stream.outcome)
        try:
            await loop.create_connection(lambda: stream, host, int(port))
            await stream.over
        except OSError as error:
            stream.outcome.error = repr(error)

    await asyncio.gather(*(one(number) for number in range(clients)))
    return outcomes
