"""HTTP plumbing: bodies with a cap, clients that go away, streams of events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from epd.errors import EpdError, ErrorKind, invalid, without_frames
from epd.obs import metrics
from gateway.answer import Answer, Part
from gateway.budget import Hold
from gateway.outcomes import STAGE, ClientGone

_log = logging.getLogger(__name__)
T = TypeVar("T")
PING = b": ping\n\n"
_DISCARD_S = 5.0
_LINGER_S = 5.0
"""How long after its deadline a stream may wait for a client that doesn't read."""


async def read_body(request: Request, limit: int, within_s: float, hold: Hold) -> list[bytes]:
    """The whole body, in pieces as they came, counted in `hold`.

    Raises:
        EpdError: REQUEST_TOO_LARGE, REQUEST_TIMEOUT if it took too long, or OVERLOADED.
        ClientGone: it left while sending.
    """
    try:
        async with asyncio.timeout(within_s):
            return await _read_body(request, limit, hold)
    except TimeoutError:
        reason = f"the body took more than {within_s:g} s"
        raise EpdError(ErrorKind.REQUEST_TIMEOUT, reason) from None
    except EpdError:
        # Who asked whether to send at all is told so at once.
        if request.headers.get("expect", "").lower() != "100-continue":
            await _discard(request, limit)
        raise


async def _read_body(request: Request, limit: int, hold: Hold) -> list[bytes]:
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        reason = f"content-encoding {coding[:32]!r} is not supported; send the body as it is"
        raise invalid(reason)
    declared = request.headers.get("content-length", "")
    expected = int(declared) if declared.isdecimal() else 0
    if expected > limit:
        raise _too_large(f"{expected} bytes", limit)
    hold.take(expected)
    chunks: list[bytes] = []
    size = 0
    async for chunk in _body_chunks(request):
        size += len(chunk)
        if size > limit:
            raise _too_large(f"at least {size} bytes", limit)
        if size > expected:
            hold.take(len(chunk))
        chunks.append(chunk)
    return chunks


def _too_large(size: str, limit: int) -> EpdError:
    reason = f"the body has {size}; {limit} are allowed"
    return EpdError(ErrorKind.REQUEST_TOO_LARGE, reason)


async def _body_chunks(request: Request) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        yield message.get("body", b"")
        more = message.get("more_body", False)


async def _discard(request: Request, limit: int) -> None:
    """A client that is still sending would see a reset instead of the answer: a body that is
    up to twice as large as may be is read and thrown away first."""
    left = 2 * limit
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_S):
            async for chunk in _body_chunks(request):
                left -= len(chunk)
                if left < 0:
                    break


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; cancel it when the client goes away.

    Raises:
        ClientGone: it did.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await cancel(task, watch)


async def gone(receive: Receive) -> None:
    """Return when the client has left, or its answer is complete."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel them and see them end."""
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
    @staticmethod
    def refused(error: EpdError) -> bytes:
        """The whole stream of a request that nothing came of."""
        ...


@dataclass(frozen=True, slots=True)
class Begun:
    """An answer with output: `first`, then `parts`."""

    answer: Answer
    encoder: AnswerEncoder
    first: Part
    parts: AsyncIterator[Part]


async def give_up(opening: asyncio.Task[Begun]) -> None:
    """Cancel an answer, whether it has begun or not."""
    opening.cancel()
    await asyncio.wait([opening])
    if not opening.cancelled() and opening.exception() is None:
        opening.result().answer.cancel()


class EventStream(Response):
    """Server-sent events of one answer, from the moment when its request was accepted or
    has waited long enough. Ends the answer when the client goes away.

    Exactly one terminal: the finish chunks and [DONE], or an error event and [DONE].
    While there is nothing to send, every `ping_s` (0: never) a comment keeps what lies
    between us and the client from closing the connection. `left` is done when the client
    is gone; the stream ends it.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        opening: asyncio.Task[Begun],
        left: asyncio.Task[None],
        refused: Callable[[EpdError], bytes],
        ping_s: float,
        within_s: float,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._opening = opening
        self._left = left
        self._refused = refused
        self._ping_s = ping_s
        self._until = loop.time() + within_s + _LINGER_S
        self._sent = loop.time()
        self._over = False
        self._writing = asyncio.Lock()
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.create_task(self._send(send))
        try:
            await self._wait({sender, self._left}, send)
        finally:
            await give_up(self._opening)
            await cancel(sender, self._left)
        if sender.cancelled():
            _log.info("the client is gone")
        elif (error := sender.exception()) is not None and not isinstance(error, OSError):
            raise error

    async def _wait(self, tasks: set[asyncio.Task[None]], send: Send) -> None:
        """Until one of them is done, or the time is over; meanwhile, ping."""
        loop = asyncio.get_running_loop()
        while (now := loop.time()) < self._until:
            due = self._sent + self._ping_s if self._ping_s else self._until
            if now >= due and not self._writing.locked():
                await self._ping(send)
                continue
            # Where a write is under way the client lags, and needs no sign of life.
            wait = max(due - now, self._ping_s / 4)
            done, _ = await asyncio.wait(
                tasks,
                timeout=min(wait, self._until - now),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if done:
                return

    async def _ping(self, send: Send) -> None:
        async with self._writing:
            self._sent = asyncio.get_running_loop().time()
            if not self._over:
                await send({"type": "http.response.body", "body": PING, "more_body": True})

    async def _send(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        async with self._writing:
            await send(start)
        async for chunk in self._chunks():
            async with self._writing:
                self._sent = loop.time()
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        async with self._writing:
            self._over = True
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begun(self) -> Begun:
        if self._opening.done():
            return self._opening.result()
        return await asyncio.shield(self._opening)

    async def _chunks(self) -> AsyncIterator[bytes]:
        """Never empty ones: an empty body would end the answer."""
        try:
            begun = await self._begun()
        except EpdError as error:
            self._told(error)
            yield self._refused(error)
            return
        encoder = begun.encoder
        try:
            with begun.answer.served():
                if chunk := encoder.first() + encoder.part(begun.first):
                    yield chunk
                async for part in begun.parts:
                    if chunk := encoder.part(part):
                        yield chunk
                yield encoder.last()
            begun.answer.finish()
        except EpdError as error:
            self._told(error)
            yield encoder.error(error)

    def _told(self, error: EpdError) -> None:
        """The client of a stream is told of a fault in an event of its own."""
        metrics.ERRORS.labels(STAGE, str(error.kind)).inc()
        _log.warning("stream ends with %s: %s", error.kind, error.for_log)
        without_frames(error)
