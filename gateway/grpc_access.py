"""Ids and the access log of the public gRPC port, as `gateway.access_log` has them for HTTP."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio

from epd.errors import EpdError
from epd.rpc.handlers import (
    Behaviour,
    HandlerInterceptor,
    behaviour_of,
    is_ours,
    with_behaviour,
)
from gateway import grpc_ids
from gateway.access import Access
from gateway.access_log import write_line
from gateway.grpc_receipt import authorization


class AccessLog(HandlerInterceptor):
    """An id for each call, and one line about it, without contents: answered, refused, given
    up, or of a method that there is not.

    Belongs inside of `TypedErrors`, to see what becomes a status, and around `Receipt`, whose
    handlers are coroutine functions all. Health and reflection are silent, as `OPEN_PATHS` are.
    """

    def __init__(self, access: Access) -> None:
        self._access = access

    def around(self, path: str, handler: Any) -> Any:
        if handler is None:
            return grpc.stream_stream_rpc_method_handler(self._unknown(path))
        if not is_ours(path):
            return handler
        assert handler.request_streaming, "Receipt reads every message"
        behaviour = behaviour_of(handler)

        async def handle(requests: Any, context: Any) -> Any:
            grpc_ids.begin(path, context)
            with self._line(path, context):
                try:
                    result = await behaviour(requests, context)
                except Exception:
                    await grpc_ids.tell(context)
                    raise
                await grpc_ids.tell(context)
                return result

        return with_behaviour(handler, handle)

    def _unknown(self, path: str) -> Behaviour:
        async def handle(_: Any, context: Any) -> None:
            grpc_ids.begin(path, context)
            code, started = grpc.StatusCode.UNIMPLEMENTED, time.monotonic()
            try:
                await grpc_ids.tell(context)
                named = (("x-request-id", grpc_ids.request_id()),)
                await context.abort(code, "there is no such method", named)
            finally:
                write_line("gRPC", path, code.name, started, self._name(context))

        return handle

    @contextmanager
    def _line(self, path: str, context: Any) -> Iterator[None]:
        started, status = time.monotonic(), "CANCELLED"
        try:
            yield
            status = "OK"
        except EpdError as error:
            status = error.mapping.grpc_code.name
            raise
        except Exception:
            if not context.done():  # else the client left while it was written to
                status = "INTERNAL"
            raise
        finally:
            write_line("gRPC", path, status, started, self._name(context))

    def _name(self, context: Any) -> str:
        try:
            return self._access.identify(authorization(context)).name
        except EpdError:
            return "?"
