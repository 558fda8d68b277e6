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
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from epd.errors import EpdError, ErrorKind
from epd.jobs import FinishReason, SampledToken
from epd.rpc import convert
from epd.rpc.status import from_rpc_error
from protos.epd.v1 import gateway_pb2 as pb
from protos.epd.v1 import gateway_pb2_grpc as pb_grpc

__all__ = [
    "Answer",
    "AsyncClient",
    "Client",
    "Delta",
    "Model",
    "Usage",
    "assistant",
    "system",
    "user",
]

_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
Content = str | bytes
"""A text, or an image file."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens; the prompt's hold those of the images."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    image_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """Some more text of one of the n answers, and its tokens."""

    text: str
    tokens: tuple[SampledToken, ...] = ()
    choice: int = 0


@dataclass(slots=True)
class Answer:
    """A whole answer. `texts` and `reasons` have one entry for each of the n."""

    request_id: str = ""
    texts: list[str] = field(default_factory=list)
    reasons: list[FinishReason | None] = field(default_factory=list)
    tokens: list[list[SampledToken]] = field(default_factory=list)
    usage: Usage = Usage()

    @property
    def text(self) -> str:
        return self.texts[0]

    @property
    def reason(self) -> FinishReason | None:
        return self.reasons[0]


@dataclass(frozen=True, slots=True)
class Model:
    id: str
    max_context: int
    fingerprint: str
    input_modalities: tuple[str, ...]


def user(*content: Content) -> pb.Message:
    """A user's message: texts and image files, in order."""
    return _message(pb.ROLE_USER, content)


def system(text: str) -> pb.Message:
    return _message(pb.ROLE_SYSTEM, [text])


def assistant(text: str) -> pb.Message:
    return _message(pb.ROLE_ASSISTANT, [text])


class Client:
    """Blocking. Threads may share one.

    `api_key` is sent as a bearer token; `credentials` (of grpc) make it TLS. Options of
    `chat` and `stream` are the fields of `GenerationOptions` in gateway.proto.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        timeout_s: float | None = None,
    ) -> None:
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=_OPTIONS)
        self._stub: Any = pb_grpc.GatewayStub(self._channel)
        self._call = _call_options(api_key, timeout_s)

    def chat(self, messages: Sequence[pb.Message], *, model: str = "", **options: Any) -> Answer:
        """The whole answer.

        Raises:
            EpdError: what the gateway says is wrong.
        """
        gathered = _Gathered(options)
        for event in self._events(_request(messages, model, options)):
            gathered.add(event)
        return gathered.answer

    def stream(
        self, messages: Sequence[pb.Message], *, model: str = "", **options: Any
    ) -> Iterator[Delta]:
        """Text as it comes.

        Raises:
            EpdError: what the gateway says is wrong.
        """
        for event in self._events(_request(messages, model, options)):
            if event.WhichOneof("kind") == "delta":
                yield _delta(event.delta)

    def models(self) -> list[Model]:
        """What is served."""
        try:
            found = self._stub.ListModels(pb.ListModelsRequest(), **self._call)
        except grpc.RpcError as error:
            raise _typed(error) from None
        return _models(found)

    def _events(self, request: pb.ChatRequest) -> Iterator[pb.ChatEvent]:
        call = self._stub.Chat(request, **self._call)
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
    ) -> None:
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=_OPTIONS)
        self._stub: Any = pb_grpc.GatewayStub(self._channel)
        self._call = _call_options(api_key, timeout_s)

    async def chat(
        self, messages: Sequence[pb.Message], *, model: str = "", **options: Any
    ) -> Answer:
        """See `Client.chat`."""
        gathered = _Gathered(options)
        async for event in self._events(_request(messages, model, options)):
            gathered.add(event)
        return gathered.answer

    async def stream(
        self, messages: Sequence[pb.Message], *, model: str = "", **options: Any
    ) -> AsyncIterator[Delta]:
        """See `Client.stream`."""
        async for event in self._events(_request(messages, model, options)):
            if event.WhichOneof("kind") == "delta":
                yield _delta(event.delta)

    async def models(self) -> list[Model]:
        """What is served."""
        try:
            return _models(await self._stub.ListModels(pb.ListModelsRequest(), **self._call))
        except grpc.aio.AioRpcError as error:
            raise _typed(error) from None

    async def _events(self, request: pb.ChatRequest) -> AsyncIterator[pb.ChatEvent]:
        call = self._stub.Chat(request, **self._call)
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


class _Gathered:
    """Events become an answer."""

    def __init__(self, options: dict[str, Any]) -> None:
        count = max(int(options.get("n") or 1), 1)
        self.answer = Answer(
            texts=[""] * count,
            reasons=[None] * count,
            tokens=[[] for _ in range(count)],
        )

    def add(self, event: pb.ChatEvent) -> None:
        answer, kind = self.answer, event.WhichOneof("kind")
        if kind == "accepted":
            answer.request_id = event.accepted.request_id
        elif kind == "delta":
            delta = _delta(event.delta)
            answer.texts[delta.choice] += delta.text
            answer.tokens[delta.choice] += delta.tokens
        elif kind == "choice_finished":
            ended = event.choice_finished
            answer.reasons[ended.choice] = convert.finish_from_proto(ended.reason)
        elif kind == "finished":
            answer.reasons[0] = convert.finish_from_proto(event.finished.reason)
            usage = event.finished.usage
            answer.usage = Usage(
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                image_tokens=usage.image_tokens,
                cached_tokens=usage.cached_tokens,
            )


def _message(role: pb.Role.ValueType, content: Sequence[Content]) -> pb.Message:
    parts = [
        pb.ContentPart(text=item) if isinstance(item, str) else pb.ContentPart(image=item)
        for item in content
    ]
    return pb.Message(role=role, parts=parts)


def _request(messages: Sequence[pb.Message], model: str, options: dict[str, Any]) -> pb.ChatRequest:
    try:
        found = pb.GenerationOptions(**options)
    except (ValueError, TypeError) as error:
        raise EpdError(ErrorKind.INVALID_REQUEST, f"options: {error}", param="options") from None
    return pb.ChatRequest(model=model, messages=messages, options=found)


def _call_options(api_key: str | None, timeout_s: float | None) -> dict[str, Any]:
    metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
    return {"timeout": timeout_s, "metadata": metadata}


def _delta(message: pb.ChatDelta) -> Delta:
    tokens = tuple(convert.token_from_proto(token) for token in message.tokens)
    return Delta(message.text, tokens, message.choice)


def _models(found: pb.ListModelsResponse) -> list[Model]:
    return [
        Model(model.id, model.max_context, model.fingerprint, tuple(model.input_modalities))
        for model in found.models
    ]


def _typed(error: Any) -> EpdError:
    """Both kinds of errors that gRPC raises have the same accessors."""
    return from_rpc_error(error)
