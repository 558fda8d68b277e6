"""A scripted server for `epd.bench`: answers bytes at given times, on a virtual clock."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from epd.bench.client import Refused
from epd.bench.record import Record


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(text: str) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": text}}])


ROLE = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
STOP = event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
DONE = b"data: [DONE]\n\n"


def usage(prompt: int, output: int, cached: int = 0) -> bytes:
    details = {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": output}
    return event(choices=[], usage={**counts, "prompt_tokens_details": details})


@dataclass(frozen=True)
class At:
    """`bytes` so many seconds after the request, or an error then."""

    s: float
    what: bytes | Exception


class Script:
    """`answer(body)` gives what comes when; `after` delays a request that finds others."""

    def __init__(self, answer: Callable[[dict[str, Any]], Sequence[At]], slots: int = 1000):
        self._answer, self._slots = answer, asyncio.Semaphore(slots)
        self.bodies: list[dict[str, Any]] = []
        self.running = self.most = 0

    async def stream(self, body: bytes) -> AsyncGenerator[bytes, None]:
        request = json.loads(body)
        self.bodies.append(request)
        async with self._slots:
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                start = asyncio.get_running_loop().time()
                for step in self._answer(request):
                    late = start + step.s - asyncio.get_running_loop().time()
                    await asyncio.sleep(max(0.0, late))
                    if isinstance(step.what, Exception):
                        raise step.what
                    yield step.what
            finally:
                self.running -= 1


def answer(first_s: float, gap_s: float, tokens: int) -> list[At]:
    """A role at once, tokens at even times, then the end."""
    times = [first_s + gap_s * n for n in range(tokens)]
    steps = [At(0.0, ROLE), *(At(t, token(" x")) for t in times)]
    return [*steps, At(times[-1], STOP + usage(7, tokens) + DONE)]


def refused(status: int) -> list[At]:
    return [At(0.0, Refused(status, b"no"))]


def record(asked: int = 3, at: float = 0.0) -> Record:
    return Record("t", "concurrency 1", 1, 0, "", asked, 0, scheduled=at)
