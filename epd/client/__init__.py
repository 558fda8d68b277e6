"""A client of the gateway's gRPC API, for Python programs: typed, sync and async.

    from epd.client import Client, user

    with Client("127.0.0.1:8001") as client:
        answer = client.chat([user("What is this?", open("cat.png", "rb").read())])
        print(answer.text, answer.usage.completion_tokens)
        for delta in client.stream([user("Count to three.")], max_tokens=20):
            print(delta.text, end="")

`AsyncClient` is the same with ``async with``, ``await`` and ``async for``. Faults are
`epd.errors.EpdError`, as everywhere: `kind`, `message`, `param`, `retry_after_s`. A stream
that is not read to its end is to be closed (`close` / `aclose`); that cancels it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from epd.client.answers import Answer, CallDelta, Delta, Gathered, TokenText, Usage, delta_of
from epd.client.messages import (
    assistant,
    chat_request,
    completion_request,
    image_url,
    system,
    tool,
    tool_result,
    user,
)
from epd.errors import EpdError
from epd.rpc.status import from_rpc_error
from protos.epd.v1 import gateway_pb2 as pb
from protos.epd.v1 import gateway_pb2_grpc as pb_grpc

__all__ = [
    "Answer",
    "AsyncClient",
    "CallDelta",
    "Client",
    "Delta",
    "Model",
    "TokenText",
    "Usage",
    "assistant",
    "image_url",
    "system",
    "tool",
    "tool_result",
    "user",
]

_Options = Sequence[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Model:
    """What is served."""

    id: str
    max_context: int
    fingerprint: str
    input_modalities: tuple[str, ...]


class Client:
    """Blocking. Threads may share one.

    `api_key` is sent as a bearer token; `credentials` (of grpc) make it TLS. Options of
    `chat`, `stream` and `complete` are the fields of `GenerationOptions` in gateway.proto.
    `tool_choice` is "auto", "none", "required", or a tool's name.

    Without `timeout_s` the gateway's deadline ends a call. A gateway that is gone without a
    word (a cut link, a stopped machine) keeps none waiting: while there are calls it is asked
    for a sign of life every `keepalive_s`, and has half of that to answer.

    As all programs that use gRPC (or httpx, as openai's client does), it goes through the proxy
    that the environment names (grpc_proxy, https_proxy, http_proxy), to a gateway on this
    machine too, but for hosts in no_proxy; with `trust_env=False` it never does.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        timeout_s: float | None = None,
        keepalive_s: float = 20.0,
        trust_env: bool = True,
    ) -> None:
        options = _channel_options(keepalive_s, trust_env)
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options=options)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=options)
        self._stub: Any = pb_grpc.GatewayStub(self._channel)
        self._call = _call_options(api_key, timeout_s)

    def chat(
        self,
        messages: Sequence[pb.Message],
        *,
        model: str = "",
        tools: Sequence[pb.Tool] = (),
        tool_choice: str = "",
        parallel_tool_calls: bool | None = None,
        **options: Any,
    ) -> Answer:
        """The whole answer.

        Raises:
            EpdError: what the gateway says is wrong.
        """
        request = chat_request(messages, model, tools, tool_choice, parallel_tool_calls, options)
        return self._gather(self._stub.Chat, request, options)

    def stream(
        self,
        messages: Sequence[pb.Message],
        *,
        model: str = "",
        tools: Sequence[pb.Tool] = (),
        tool_choice: str = "",
        parallel_tool_calls: bool | None = None,
        **options: Any,
    ) -> Iterator[Delta]:
        """Text as it comes.

        Raises:
            EpdError: what the gateway says is wrong.
        """
        request = chat_request(messages, model, tools, tool_choice, parallel_tool_calls, options)
        for event in self._events(self._stub.Chat, request):
            if event.WhichOneof("kind") == "delta":
                yield delta_of(event.delta)

    def complete(self, prompt: str | Sequence[int], *, model: str = "", **options: Any) -> Answer:
        """What follows a text, or token ids, without a chat template.

        Raises:
            EpdError: what the gateway says is wrong.
        """
        request = completion_request(prompt, model, options)
        return self._gather(self._stub.Complete, request, options)

    def tokenize(self, content: str | Sequence[pb.Message]) -> list[int]:
        """Ids of a text, or of messages as the model would get them."""
        reply = self._single(self._stub.Tokenize, _tokenize(content))
        return list(reply.ids)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        reply = self._single(self._stub.Detokenize, pb.DetokenizeRequest(ids=ids))
        return str(reply.text)

    def models(self) -> list[Model]:
        """What is served."""
        return _models(self._single(self._stub.ListModels, pb.ListModelsRequest()))

    def _gather(self, method: Any, request: Any, options: dict[str, Any]) -> Answer:
        gathered = Gathered(options)
        for event in self._events(method, request):
            gathered.add(event)
        return gathered.answer

    def _single(self, method: Any, request: Any) -> Any:
        try:
            return method(request, **self._call)
        except grpc.RpcError as error:
            raise _typed(error) from None

    def _events(self, method: Any, request: Any) -> Iterator[pb.ChatEvent]:
        call = method(request, **self._call)
        try:
            yield from call
        except grpc.RpcError as error:
            raise _typed(error) from None
        finally:
            call.cancel()

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class AsyncClient:
    """Like `Client`, for asyncio."""

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        timeout_s: float | None = None,
        keepalive_s: float = 20.0,
        trust_env: bool = True,
    ) -> None:
        options = _channel_options(keepalive_s, trust_env)
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=options)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=options)
        self._stub: Any = pb_grpc.GatewayStub(self._channel)
        self._call = _call_options(api_key, timeout_s)

    async def chat(
        self,
        messages: Sequence[pb.Message],
        *,
        model: str = "",
        tools: Sequence[pb.Tool] = (),
        tool_choice: str = "",
        parallel_tool_calls: bool | None = None,
        **options: Any,
    ) -> Answer:
        """See `Client.chat`."""
        request = chat_request(messages, model, tools, tool_choice, parallel_tool_calls, options)
        return await self._gather(self._stub.Chat, request, options)

    async def stream(
        self,
        messages: Sequence[pb.Message],
        *,
        model: str = "",
        tools: Sequence[pb.Tool] = (),
        tool_choice: str = "",
        parallel_tool_calls: bool | None = None,
        **options: Any,
    ) -> AsyncIterator[Delta]:
        """See `Client.stream`."""
        request = chat_request(messages, model, tools, tool_choice, parallel_tool_calls, options)
        async for event in self._events(self._stub.Chat, request):
            if event.WhichOneof("kind") == "delta":
                yield delta_of(event.delta)

    async def complete(
        self, prompt: str | Sequence[int], *, model: str = "", **options: Any
    ) -> Answer:
        """See `Client.complete`."""
        request = completion_request(prompt, model, options)
        return await self._gather(self._stub.Complete, request, options)

    async def tokenize(self, content: str | Sequence[pb.Message]) -> list[int]:
        """See `Client.tokenize`."""
        reply = await self._single(self._stub.Tokenize, _tokenize(content))
        return list(reply.ids)

    async def detokenize(self, ids: Sequence[int]) -> str:
        """See `Client.detokenize`."""
        reply = await self._single(self._stub.Detokenize, pb.DetokenizeRequest(ids=ids))
        return str(reply.text)

    async def models(self) -> list[Model]:
        """What is served."""
        return _models(await self._single(self._stub.ListModels, pb.ListModelsRequest()))

    async def _gather(self, method: Any, request: Any, options: dict[str, Any]) -> Answer:
        gathered = Gathered(options)
        async for event in self._events(method, request):
            gathered.add(event)
        return gathered.answer

    async def _single(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, **self._call)
        except grpc.aio.AioRpcError as error:
            raise _typed(error) from None

    async def _events(self, method: Any, request: Any) -> AsyncIterator[pb.ChatEvent]:
        call = method(request, **self._call)
        try:
            async for event in call:
                yield event
        except grpc.aio.AioRpcError as error:
            raise _typed(error) from None
        finally:
            call.cancel()

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


def _tokenize(content: str | Sequence[pb.Message]) -> pb.TokenizeRequest:
    if isinstance(content, str):
        return pb.TokenizeRequest(text=content)
    return pb.TokenizeRequest(messages=content)


def _channel_options(keepalive_s: float, trust_env: bool) -> _Options:
    period = int(keepalive_s * 1000)
    return [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.keepalive_time_ms", period),
        ("grpc.keepalive_timeout_ms", period // 2),
        # What gRPC 1.85 really waits for an answer; a minute by itself.
        ("grpc.http2.ping_timeout_ms", period // 2),
        # Also where an answer takes its time: the gateway allows it (`rpc.keepalive_s`).
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.enable_http_proxy", int(trust_env)),
    ]


def _call_options(api_key: str | None, timeout_s: float | None) -> dict[str, Any]:
    metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
    return {"timeout": timeout_s, "metadata": metadata}


def _models(found: pb.ListModelsResponse) -> list[Model]:
    return [
        Model(model.id, model.max_context, model.fingerprint, tuple(model.input_modalities))
        for model in found.models
    ]


def _typed(error: Any) -> EpdError:
    """Both kinds of errors that gRPC raises have the same accessors."""
    return from_rpc_error(error)
