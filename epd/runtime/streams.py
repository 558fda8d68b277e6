"""Streams of a stage: which are open, how one is read, how all are ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import grpc.aio

from epd.errors import EpdError, ErrorKind, invalid
from epd.obs.logs import request_id, set_request
from epd.rpc.jobs import MAX_REQUEST_ID
from epd.rpc.status import internal
from epd.runtime.mailbox import Mailbox

Message = TypeVar("Message")
logger = logging.getLogger(__name__)

SETTLE_S = 0.02
"""A cancelled RPC looks like a half-close first: gRPC reports the end of the
messages, and cancels the handler a moment later. Only an end that is not followed
by a cancellation within this time is a half-close, which releases memory. (Were it
ever misread: the reader's checksums find overwritten bytes.)"""


async def next_message(context: grpc.aio.ServicerContext[Message, Any]) -> Message | None:
    """The client's next message; None when it has half-closed."""
    message: Any = await context.read()  # type: ignore[no-untyped-call,unused-ignore]
    if message is not grpc.aio.EOF:
        return message  # type: ignore[no-any-return]
    await asyncio.sleep(SETTLE_S)
    return None


@asynccontextmanager
async def deadline(
    context: grpc.aio.ServicerContext[Any, Any], default_s: float
) -> AsyncIterator[None]:
    """Nothing waits for ever: the client's deadline ends the call (gRPC cancels it),
    `default_s` does where the client gave none.

    Raises:
        EpdError: DEADLINE_EXCEEDED, `default_s` is over.
    """
    if context.time_remaining() is not None:
        yield
        return
    try:
        async with asyncio.timeout(default_s) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise EpdError(
            ErrorKind.DEADLINE_EXCEEDED, f"not done within {default_s:g} s (the server's limit)"
        ) from None


async def first_job(context: grpc.aio.ServicerContext[Any, Any]) -> Any:
    """The job message, which must come first; logs belong to its request from here on.

    Raises:
        EpdError: something else came first, or nothing.
    """
    first = await next_message(context)
    if first is None or not first.HasField("job"):
        raise invalid("the first message must hold a job", "job")
    name = first.job.request_id[:MAX_REQUEST_ID]
    set_request(name if name.isprintable() else repr(name))
    return first.job


@contextmanager
def receiving(
    mailbox: Mailbox[Any],
    context: grpc.aio.ServicerContext[Message, Any],
    on_message: Callable[[Message], None],
    on_half_close: Callable[[], None],
) -> Iterator[None]:
    """While the servicer writes from `mailbox`, hand the client's messages to the worker; a
    fault ends the stream through `mailbox`."""
    reader = asyncio.create_task(_read(mailbox, context, on_message, on_half_close))
    try:
        yield
    finally:
        reader.cancel()


async def _read(
    mailbox: Mailbox[Any],
    context: grpc.aio.ServicerContext[Message, Any],
    on_message: Callable[[Message], None],
    on_half_close: Callable[[], None],
) -> None:
    try:
        while (message := await next_message(context)) is not None:
            on_message(message)
        on_half_close()
    except EpdError as error:
        mailbox.close(error)
    except Exception:
        logger.exception("reading a stream raised")
        mailbox.close(internal(request_id()))


Fail = Callable[[EpdError], None]


class Streams:
    """Open streams of one worker."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._open: dict[int, list[Fail]] = {}
        self._next = 0
        self._leaving = False
        self._none_open = asyncio.Event()
        self._none_open.set()

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def open(self) -> Iterator[list[Fail]]:
        """Count a stream. What is put into the list is called to end it early.

        Raises:
            EpdError: NOT_STARTED, the worker is leaving.
        """
        if self._leaving:
            raise EpdError(
                ErrorKind.NOT_STARTED, f"this {self._stage} worker is leaving", retry_after_s=1.0
            )
        key, self._next = self._next, self._next + 1
        fails = self._open[key] = []
        self._none_open.clear()
        try:
            yield fails
        finally:
            del self._open[key]
            if not self._open:
                self._none_open.set()

    def refuse_new(self) -> None:
        self._leaving = True

    async def finished(self) -> None:
        """Wait until no stream is open."""
        await self._none_open.wait()

    def fail_all(self, error: EpdError) -> None:
        for fails in list(self._open.values()):
            for fail in fails:
                fail(error)


class Stopwatch:
    """Milliseconds since it was made."""

    __slots__ = ("_start",)

    def __init__(self) -> None:
        self._start = time.monotonic()

    @property
    def ms(self) -> float:
        return (time.monotonic() - self._start) * 1e3
