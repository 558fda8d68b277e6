"""HTTP plumbing: bodies with a cap, clients that go away, streams of events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from epd.errors import EpdError, ErrorKind
from gateway.chat import Answer, Part

_log = logging.getLogger(__name__)
T = TypeVar("T")
_DISCARD_S = 5.0
_LINGER_S = 5.0
"""How long after its deadline a stream may wait for a client that doesn't read."""


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


async def read_body(request: Request, limit: int, within_s: float) -> bytes:
    """The whole body.

    Raises:
        EpdError: REQUEST_TOO_LARGE, or DEADLINE_EXCEEDED if it took too long.
        ClientGone: it left while sending.
    """
    try:
        async with asyncio.timeout(within_s):
            return await _read_body(request, limit)
    except TimeoutError:
        reason = f"the body took more than {within_s:g} s"
        raise EpdError(ErrorKind.DEADLINE_EXCEEDED, reason) from None


async def _read_body(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise await _too_large(request, limit)
    chunks: list[bytes] = []
    size = 0
    async for chunk in _body_chunks(request):
        size += len(chunk)
        if size > limit:
            raise await _too_large(request, limit)
        chunks.append(chunk)
    return b"".join(chunks)


async def _body_chunks(request: Request) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        yield message.get("body", b"")
        more = message.get("more_body", False)


async def _too_large(request: Request, limit: int) -> EpdError:
    """A client that is still sending would see a reset instead of the answer: as much
    again is read and thrown away first."""
    left = limit
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_S):
            async for chunk in _body_chunks(request):
                left -= len(chunk)
                if left < 0:
                    break
    return EpdError(ErrorKind.REQUEST_TOO_LARGE, f"the body has more than {limit} bytes")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; cancel it when the client goes away.

    Raises:
        ClientGone: it did.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _cancel(task, watch)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


class AnswerEncoder(Protocol):
    """One of the forms that answers have. Chunks are whole events, or b""."""

    def first(self) -> bytes: ...
    def part(self, part: Part) -> bytes: ...
    def last(self) -> bytes: ...
    def whole(self, parts: Sequence[Part]) -> bytes: ...
    def error(self, error: EpdError) -> bytes: ...


class EventStream(Response):
    """Server-sent events of one answer that has begun with `first` and goes on with
    `parts`. Ends it when the client goes away.

    Exactly one terminal: the finish chunks and [DONE], or an error event and [DONE].
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        answer: Answer,
        first: Part,
        parts: AsyncIterator[Part],
        encoder: AnswerEncoder,
        headers: dict[str, str],
    ) -> None:
        self._answer = answer
        self._first = first
        self._parts = parts
        self._encoder = encoder
        self.status_code = 200
        self.background = None
        self.init_headers({**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        sender = asyncio.create_task(self._send(send))
        watch = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait(
                {sender, watch},
                timeout=self._answer.deadline + _LINGER_S - loop.time(),
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            self._answer.cancel()
            await _cancel(sender, watch)
        if sender.cancelled():
            _log.info("the client of %s is gone", self._answer.request_id)
        elif (error := sender.exception()) is not None and not isinstance(error, OSError):
            raise error

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for chunk in self._chunks():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _chunks(self) -> AsyncIterator[bytes]:
        encoder = self._encoder
        if chunk := encoder.first():
            yield chunk
        if chunk := encoder.part(self._first):
            yield chunk
        try:
            async for part in self._parts:
                if chunk := encoder.part(part):  # an empty body would end the answer
                    yield chunk
        except EpdError as error:
            _log.warning("stream ends with %s: %s", error.kind, error.message)
            yield encoder.error(error)
            return
        yield encoder.last()
