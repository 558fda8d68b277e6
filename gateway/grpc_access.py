"""The access log of the public gRPC port: the line that `gateway.access` writes for HTTP."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio

from epd.errors import EpdError
from epd.rpc.handlers import behaviour_of, is_ours, with_behaviour
from gateway.access import Access, write_line
from gateway.grpc_receipt import authorization


class AccessLog(grpc.aio.ServerInterceptor):
    """One line about each call of ours, without contents: answered, refused or given up.

    Belongs inside of `TypedErrors`, to see what becomes a status, and around `Receipt`, whose
    handlers are coroutine functions all. Health and reflection are silent, as `OPEN_PATHS` are.
    """

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        path = handler_call_details.method
        if handler is None or not is_ours(path):
            return handler
        assert handler.request_streaming, "Receipt reads every message"
        behaviour = behaviour_of(handler)

        async def handle(requests: Any, context: Any) -> Any:
            with self._line(path, context):
                return await behaviour(requests, context)

        return with_behaviour(handler, handle)

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
