"""Single requests that `epd.bench`'s workloads don't describe: words before pictures, the
next turn of a conversation, the same picture behind other words. And what a service counts.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Sequence
from typing import Any

import orjson

from bench.loopback import get
from bench.service import Service
from epd.bench.client import send
from epd.bench.content import data_url
from epd.bench.load import Target
from epd.bench.record import Record
from epd.bench.workload import Picture, Shape

Message = dict[str, Any]
_TIMEOUT_S = 600.0
# Ids of a random model may be halves of characters, which make no text; logprobs come with
# every token.
EXTRA = {"ignore_eos": True, "timeline": True, "logprobs": True}


class Asker:
    """Words and pictures of its own: what it makes is new to every cache."""

    def __init__(self, target: Target, seed: int) -> None:
        self.target = target
        self._rng = random.Random(seed)

    def words(self, tokens: int) -> str:
        return self.target.words.text(Shape(tokens, 1), self._rng) if tokens else ""

    def picture(self, side: int) -> Picture:
        return Picture(side, side, self._rng.getrandbits(62))

    async def ask(self, messages: Sequence[Message], kind: str, tokens: int = 2) -> Record:
        """Of a service that is up.

        Raises:
            SystemExit: the request failed.
        """
        target = self.target
        request = {
            "model": target.model,
            "messages": list(messages),
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body = orjson.dumps({**request, **EXTRA})
        now = asyncio.get_running_loop().time()
        record = Record(target.name, "concurrency 1", 0, 0, kind, tokens, 0, scheduled=now)
        await send(target.transport, body, record, _TIMEOUT_S)
        if not record.ok:
            raise SystemExit(f"{target.name}, {kind}: {record.error}: {record.detail}")
        return record


def user(before: str, pictures: Sequence[Picture], after: str) -> Message:
    """A message with words, then pictures, then words."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": data_url(picture)}} for picture in pictures
    ]
    texts = [{"type": "text", "text": text} if text else None for text in (before, after)]
    content = [part for part in (texts[0], *parts, texts[1]) if part]
    return {"role": "user", "content": content}


def counted(service: Service, worker: str, sample: str) -> float:
    """The value of one sample ("name{labels}") on a worker's metrics page; 0 before the
    first event."""
    with get(f"http://{service.metrics[worker]}/metrics", 10) as page:
        text = page.read().decode()
    found = re.search(rf"^{re.escape(sample)} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0
