"""Sends one chat request as a stream and notes when its tokens came.

Cheap on purpose: it shares the machine with what it measures. `epd bench ceiling` says how
many events a second it can take.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator
from typing import Any, Protocol

import aiohttp
import orjson

from epd.bench.record import Record
from epd.bench.sse import EventParser

_CHUNK_BYTES = 1 << 16
_DETAIL_CHARS = 300


class Refused(Exception):
    """The server answered with a status that isn't 200."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(body.decode(errors="replace")[:_DETAIL_CHARS])
        self.status = status


class Transport(Protocol):
    """How a request's bytes get to a server and back."""

    def stream(self, body: bytes) -> AsyncGenerator[bytes, None]:
        """Send; the answer's bytes as they come.

        Raises:
            Refused: not a 200.
        """
        ...


class HttpTransport:
    """One target over HTTP."""

    def __init__(self, url: str, session: aiohttp.ClientSession, api_key: str = "none") -> None:
        self._url = url.rstrip("/") + "/chat/completions"
        self._session = session
        self._headers = {
            "Authorization": f"Bearer {api_key}",
            "Content-Type": "application/json",
        }

    async def stream(self, body: bytes) -> AsyncGenerator[bytes, None]:
        post = self._session.post(self._url, data=body, headers=self._headers)
        async with post as response:
            if response.status != 200:
                raise Refused(response.status, await response.content.read(1 << 16))
            async for chunk in response.content.iter_any():
                yield chunk


def open_session(timeout_s: float, *, keep: bool = True) -> aiohttp.ClientSession:
    """Without a limit on connections: the load decides how many there are. Without `keep`
    each request has one of its own, for servers that promise to keep them and don't."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=min(10.0, timeout_s))
    connector = aiohttp.TCPConnector(limit=0, force_close=not keep)
    return aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=_CHUNK_BYTES)


async def send(transport: Transport, body: bytes, record: Record, timeout_s: float) -> None:
    """Send `body`, fill in `record`; errors are noted there, never raised."""
    clock = asyncio.get_running_loop().time
    record.sent = clock()
    answer = _Answer(record)
    try:
        async with asyncio.timeout(timeout_s):
            await _follow(transport, body, answer)
        answer.check()
    except Refused as error:
        _fail(record, f"http_{error.status}", str(error))
    except TimeoutError:
        _fail(record, "timeout", f"not done within {timeout_s:g} s")
    except aiohttp.ClientConnectorError as error:
        _fail(record, "connect", str(error))
    except (aiohttp.ClientError, OSError) as error:
        _fail(record, "connection_lost", f"{type(error).__name__}: {error}")
    except Malformed as error:
        _fail(record, error.kind, str(error))
    record.ended = clock()


async def _follow(transport: Transport, body: bytes, answer: _Answer) -> None:
    clock = asyncio.get_running_loop().time
    parser = EventParser()
    async with contextlib.aclosing(transport.stream(body)) as chunks:
        async for chunk in chunks:
            now = clock()
            try:
                events = parser.feed(chunk)
            except ValueError as error:
                raise Malformed("bad_event", str(error)) from error
            for data in events:
                answer.take(data, now)
    if parser.pending:
        raise Malformed("truncated", "the stream ended inside an event")


class Malformed(Exception):
    """A 200 whose stream is not a whole answer."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class _Answer:
    """Reads the events of one answer into its record."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._done = False
        self._finished_at: float | None = None

    def take(self, data: bytes, now: float) -> None:
        """
        Raises:
            Malformed: it is no event of a chat.
        """
        if data == b"[DONE]":
            self._done = True
            return
        try:
            self._read(orjson.loads(data), now)
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            # Whatever another server means by it, the measurement goes on.
            raise Malformed("bad_event", f"{error}: {data[:80]!r}") from error

    def _read(self, event: Any, now: float) -> None:
        if failure := event.get("error"):
            raise Malformed("stream_error", str(failure)[:_DETAIL_CHARS])
        choices = event.get("choices") or ()
        if any(_brings_tokens(choice) for choice in choices):
            self._record.arrivals.append(now)
        if any(choice.get("finish_reason") for choice in choices):
            self._finished_at = now
        if usage := event.get("usage"):
            self._usage(usage)
        if timeline := event.get("timeline"):
            _note_phases(self._record, timeline)

    def check(self) -> None:
        """Whether that was a whole answer.

        Raises:
            Malformed: no.
        """
        record = self._record
        if not self._done and self._finished_at is None:
            raise Malformed("truncated", "neither a finish_reason nor [DONE]")
        if not record.arrivals and record.output_tokens and self._finished_at is not None:
            # Tokens that make no text (halves of characters): the end is all that one sees.
            record.arrivals.append(self._finished_at)
        if not record.arrivals:
            raise Malformed("empty", "an answer without a token")
        record.output_tokens = record.output_tokens or len(record.arrivals)

    def _usage(self, usage: dict[str, Any]) -> None:
        self._record.prompt_tokens = usage.get("prompt_tokens") or 0
        self._record.output_tokens = usage.get("completion_tokens") or 0
        details = usage.get("prompt_tokens_details") or {}
        self._record.cached_tokens = details.get("cached_tokens") or 0


def _brings_tokens(choice: dict[str, Any]) -> bool:
    """Text, a token without text (it may be half of a character), or part of a call. The
    first event of most servers has a role only; the last a finish_reason only."""
    delta = choice.get("delta") or {}
    return bool(
        delta.get("content")
        or delta.get("reasoning_content")
        or delta.get("tool_calls")
        or (choice.get("logprobs") or {}).get("content")
    )


def _note_phases(record: Record, timeline: Any) -> None:
    phases = timeline["phases"] if isinstance(timeline, dict) else timeline
    for phase in phases:
        start = phase.get("start_ms", 0.0)
        record.spans[phase["name"]] = (start, start + phase["duration_ms"])
        name = re.sub(r"\[\d+\]", "", phase["name"])
        record.phases[name] = record.phases.get(name, 0.0) + phase["duration_ms"]
        record.moved[name] = record.moved.get(name, 0) + phase.get("bytes", 0)


def _fail(record: Record, kind: str, detail: str) -> None:
    record.error, record.detail = kind, detail
