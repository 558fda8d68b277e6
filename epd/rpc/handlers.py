"""Handlers of gRPC methods, and how interceptors put something around them."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio

Behaviour = Callable[[Any, Any], Any]
"""What a servicer does: (request or requests, context) -> response, or its awaitable, or an
asynchronous generator of responses."""
_OURS = "/epd.v1."


class HandlerInterceptor(grpc.aio.ServerInterceptor):
    """Puts something around methods' handlers."""

    @abstractmethod
    def around(self, path: str, handler: Any) -> Any:
        """What serves the method in place of `handler`, which is None for a method that there
        is not."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        return self.around(handler_call_details.method, await continuation(handler_call_details))


def is_ours(path: str) -> bool:
    """Whether a method is one of our services'; health and reflection are not."""
    return path.startswith(_OURS)


def behaviour_of(handler: grpc.RpcMethodHandler[Any, Any]) -> Behaviour:
    """What it calls."""
    behaviour: Behaviour = getattr(handler, _kind(handler.request_streaming, handler))
    return behaviour


def with_behaviour(
    handler: grpc.RpcMethodHandler[Any, Any],
    behaviour: Behaviour,
    *,
    request_streaming: bool | None = None,
) -> Any:
    """The same method with another behaviour; `request_streaming` where that reads its
    messages otherwise than the old one."""
    streaming = handler.request_streaming if request_streaming is None else request_streaming
    build = getattr(grpc, f"{_kind(streaming, handler)}_rpc_method_handler")
    return build(
        behaviour,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


async def finish(result: Any, context: Any) -> Any:
    """What a behaviour returned, to its end: a response, or None when all were written.

    A generator is closed here and now, not when it is collected: what it holds is let go at
    once.
    """
    if not inspect.isasyncgen(result):
        return await result if inspect.isawaitable(result) else result
    async with aclosing(result) as events:
        async for event in events:
            await context.write(event)
    return None


def _kind(request_streaming: bool, handler: grpc.RpcMethodHandler[Any, Any]) -> str:
    many = {True: "stream", False: "unary"}
    return f"{many[request_streaming]}_{many[bool(handler.response_streaming)]}"
