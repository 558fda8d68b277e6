"""Receipt of messages at the public gRPC port: in time, from who may call.

grpc.aio calls a unary handler when the whole message is there, however long that takes and
however much of it is in memory by then. On the wire a unary request is a stream of one
message; read as such, its receipt can have an end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from epd.config import Config
from epd.errors import EpdError, ErrorKind, invalid
from epd.rpc.handlers import HandlerInterceptor, behaviour_of, finish, is_ours, with_behaviour
from epd.rpc.status import to_status
from gateway.access import Access
from gateway.bodies import LIGHT_BYTES, LIGHT_VALUES, BodyReader
from gateway.budget import Budget
from gateway.forms import Form, no_message
from gateway.grpc_request import Checked
from gateway.grpc_wire import descriptor_of, is_light
from gateway.outcomes import beginning

_FORMS = frozenset(map(str, Form))
_ANSWERS = frozenset({"/epd.v1.Gateway/Chat", "/epd.v1.Gateway/Complete"})
"""Calls of these are counted by how they end (`gateway.outcomes`)."""
_PROMPT_S = 5.0
"""A message that isn't there after this is counted as one of the largest allowed."""
_AGE_S = 3600
"""Clients connect anew after this; calls that hang on a peer that doesn't read end then."""


def options(config: Config) -> list[tuple[str, int]]:
    """Channel arguments of the public port."""
    limits = config.limits
    grace_s = limits.request_deadline_s + config.gateway.slow_reader_s
    return [
        ("grpc.max_concurrent_streams", limits.max_inflight),
        ("grpc.server_handshake_timeout_ms", int(config.gateway.head_s * 1000)),
        ("grpc.max_connection_age_ms", _AGE_S * 1000),
        ("grpc.max_connection_age_grace_ms", int(grace_s * 1000)),
    ]


class Receipt(HandlerInterceptor):
    """Reads the message of every unary request itself; of ours, after the key was checked."""

    def __init__(self, config: Config, access: Access, bodies: BodyReader, budget: Budget) -> None:
        self._access = access
        self._bodies = bodies
        self._budget = budget
        self._within_s = config.gateway.body_s
        limits = config.limits
        self._most = max(1, (limits.max_inflight_mib << 20) // limits.max_body_bytes)
        self._slots = self._most

    def around(self, path: str, handler: Any) -> Any:
        if handler is None or handler.request_streaming:
            return handler
        parse, behaviour = handler.request_deserializer, behaviour_of(handler)

        async def handle(_: AsyncIterator[Any], context: Any) -> Any:
            message = await self._message(path, parse, context)
            return await finish(behaviour(message, context), context)

        made = with_behaviour(handler, handle, request_streaming=True)
        if not is_ours(path):
            return made
        return made._replace(request_deserializer=None)  # bytes, as they came

    async def _message(self, method: str, parse: Callable[[bytes], Any], context: Any) -> Any:
        """The request: a message, or of ours `Checked` where it was a heavy one.

        Raises:
            EpdError: of one of our methods; others are aborted with the same status.
        """
        ours = is_ours(method)
        try:
            with beginning() if method in _ANSWERS else nullcontext():
                if not ours:
                    return await self._read(context)
                salt = self._access.identify(authorization(context)).salt
                return await self._parsed(method, parse, await self._read(context), salt)
        except EpdError as error:
            if ours:
                raise
            code, message, metadata = to_status(error)
            await context.abort(code, message, tuple(metadata))

    async def _read(self, context: Any) -> Any:
        reading = asyncio.ensure_future(context.read())
        try:
            await asyncio.wait([reading], timeout=min(_PROMPT_S, self._within_s))
            if not reading.done():
                with self._slot():
                    await asyncio.wait([reading], timeout=self._within_s - _PROMPT_S)
            if not reading.done():
                reason = f"the message took more than {self._within_s:g} s"
                raise EpdError(ErrorKind.REQUEST_TIMEOUT, reason)
        finally:
            reading.cancel()
        try:
            message = reading.result()
        except DecodeError:  # of another's method: ours come as bytes
            raise no_message() from None
        if message is grpc.aio.EOF:
            raise invalid("there is no message")
        return message

    async def _parsed(
        self, method: str, parse: Callable[[bytes], Any], data: bytes, salt: bytes
    ) -> Any:
        kind = descriptor_of(parse)
        if len(data) <= LIGHT_BYTES and is_light(data, kind, LIGHT_VALUES):
            try:
                return parse(data)
            except DecodeError:
                raise no_message() from None
        if method not in _FORMS:
            reason = f"the message has {len(data)} bytes, too many for this method"
            raise EpdError(ErrorKind.REQUEST_TOO_LARGE, reason)
        with self._budget.hold(salt) as hold:
            hold.take(len(data))
            call = await self._bodies.read_apart(Form(method), (data,), salt)
        return Checked(call, len(data))

    @contextmanager
    def _slot(self) -> Iterator[None]:
        if not self._slots:
            reason = f"{self._most} large messages are on their way, the most at once"
            raise EpdError(ErrorKind.OVERLOADED, reason, retry_after_s=1.0)
        self._slots -= 1
        try:
            yield
        finally:
            self._slots += 1


def authorization(context: Any) -> str | None:
    """What the caller's metadata says of who they are."""
    metadata = dict(context.invocation_metadata() or ())
    value = metadata.get("authorization")
    return value if isinstance(value, str) else None
