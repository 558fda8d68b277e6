"""HTTP plumbing: bodies with a cap, clients that go away, streams of events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
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
    _require_plain(request)
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


def _require_plain(request: Request) -> None:
    """The parser takes the chunks apart and leaves what is in them as it is, whatever else was
    done to it on the way. Not 501, which RFC 9112 suggests: OpenAI's clients would ask again.

    Raises:
        EpdError: it is compressed, or coded otherwise.
    """
    for name, plain in (("content-encoding", "identity"), ("transfer-encoding", "chunked")):
        coding = ", ".join(request.headers.getlist(name)) or plain
        if coding.lower() != plain:
            reason = f"{name} {coding[:32]!r} is not supported; send the body as it is"
            raise invalid(reason)


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


class EventStream(Response):
    """Server-sent events of one answer. Ends the answer when the client goes away.

    Until there is output, a fault is raised and gets a status of its own instead of an
    event; but no client is left without a sign for longer than `ping_s` (0: it may be).
    From then on there is exactly one terminal: the finish chunks and [DONE], or an error
    event and [DONE]. While there is nothing to send, every `ping_s` a comment keeps what
    lies between us and the client from closing the connection.

    One task opens the answer and sends it: what stands between a token and the client is
    one turn of the event loop.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        opening: Callable[[], Awaitable[Begun]],
        over: Callable[[], None],
        refused: Callable[[EpdError], bytes],
        ping_s: float,
        within_s: float,
    ) -> None:
        """`opening` is called once; `over` is, when nothing of the answer is left."""
        self._opening = opening
        self._over = over
        self._refused = refused
        self._ping_s = ping_s
        self._within_s = within_s + _LINGER_S
        self._sent = 0.0
        self._started = self._ended = False
        self._writing = asyncio.Lock()
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """
        Raises:
            EpdError: nothing came of it, and nothing was sent.
            ClientGone: before anything was sent.
        """
        left = asyncio.create_task(gone(receive))
        sender = asyncio.create_task(self._send(send))
        sender.add_done_callback(lambda _: self._over())
        try:
            await self._wait({sender, left}, send)
        finally:
            await cancel(sender, left)
        if sender.cancelled():
            if not self._started:
                raise ClientGone
            _log.info("the client is gone")
        elif (error := sender.exception()) is not None and not isinstance(error, OSError):
            raise error

    async def _wait(self, tasks: set[asyncio.Task[None]], send: Send) -> None:
        """Until one of them is done, or the time is over; meanwhile, signs of life."""
        loop = asyncio.get_running_loop()
        self._sent = loop.time()
        until = self._sent + self._within_s
        while (now := loop.time()) < until:
            due = self._sent + self._ping_s if self._ping_s else until
            if now >= due and not self._writing.locked():
                await self._sign(send)
                continue
            # Where a write is under way the client lags, and needs no sign of life.
            wait = max(due - now, self._ping_s / 4)
            done, _ = await asyncio.wait(
                tasks,
                timeout=min(wait, until - now),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if done:
                return

    async def _sign(self, send: Send) -> None:
        """The head of the answer, later a comment."""
        async with self._writing:
            self._sent = asyncio.get_running_loop().time()
            if not self._started:
                await self._start(send)
            elif not self._ended:
                await send({"type": "http.response.body", "body": PING, "more_body": True})

    async def _start(self, send: Send) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

    async def _send(self, send: Send) -> None:
        try:
            begun = await self._opening()
        except EpdError as error:
            if not self._started:
                raise
            self._told(error)
            await self._put(self._refused(error), send)
        else:
            try:
                async for chunk in self._events(begun):
                    await self._put(chunk, send)
            finally:
                begun.answer.cancel()
        async with self._writing:
            self._ended = True
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _put(self, chunk: bytes, send: Send) -> None:
        async with self._writing:
            self._sent = asyncio.get_running_loop().time()
            if not self._started:
                await self._start(send)
            await send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def _events(self, begun: Begun) -> AsyncIterator[bytes]:
        """Never empty ones: an empty body would end the answer."""
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
        _log.log(error.log_level, "stream ends with %s: %s", error.kind, error.for_log)
        without_frames(error)
