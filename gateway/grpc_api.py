"""The public gRPC API: translation to and from what the HTTP API uses, and nothing else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any, Literal, get_args

from epd.config import LimitsConfig
from epd.errors import EpdError, ErrorKind, invalid
from epd.obs import logs
from epd.rpc import convert
from epd.text.messages import ChatMessage, ImagePart, TextPart
from epd.text.output import Piece
from gateway.access import Access
from gateway.chat import Answer, ChatService, Part, new_request_id
from gateway.content import Conversation, ImageSource, conversation
from gateway.fields import Fields
from gateway.grpc_receipt import authorization
from gateway.schema import ChatCall, read_generation
from protos.epd.v1 import gateway_pb2 as pb
from protos.epd.v1 import gateway_pb2_grpc as pb_grpc

_log = logging.getLogger(__name__)
SERVICE = "epd.v1.Gateway"
_Option = Literal[
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "n",
    "guided_json",
    "guided_regex",
]
_ROLES = {pb.ROLE_SYSTEM: "system", pb.ROLE_USER: "user", pb.ROLE_ASSISTANT: "assistant"}
_OPTIONAL: tuple[_Option, ...] = get_args(_Option)


class GatewayService(pb_grpc.GatewayServicer):
    """Same checks, same limits and same answers as over HTTP."""

    def __init__(
        self, service: ChatService, vocab_size: int, fingerprint: str, access: Access
    ) -> None:
        self._access = access
        self._service = service
        self._vocab_size = vocab_size
        self._fingerprint = fingerprint

    async def Chat(self, request: pb.ChatRequest, context: Any) -> None:  # type: ignore[override]
        with self._access.admit(authorization(context)):
            request_id = new_request_id()
            with logs.bind(request_id):
                answer = await self._open(request, request_id, context.time_remaining())
            try:
                async for event in _events(answer):
                    await self._write(event, context)
            finally:
                answer.cancel()

    async def _open(self, request: pb.ChatRequest, request_id: str, left_s: float | None) -> Answer:
        service = self._service
        with service.budget.hold() as hold:
            hold.take(request.ByteSize())
            call = call_from_proto(request, service.config.limits, self._vocab_size)
            answer = await service.open(call, request_id, hold, left_s)
            hold.keep()
        return answer

    async def _write(self, event: pb.ChatEvent, context: Any) -> None:
        """Flow control holds it back while the client doesn't read."""
        within_s = self._service.config.gateway.slow_reader_s
        try:
            async with asyncio.timeout(within_s):
                await context.write(event)
        except TimeoutError:
            reason = f"the client took nothing of its answer for {within_s:g} s"
            raise EpdError(ErrorKind.CANCELLED, reason) from None

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Any
    ) -> pb.ListModelsResponse:
        self._access.identify(authorization(context))
        model = pb.ModelInfo(
            id=self._service.model,
            max_context=self._service.preparer.max_context,
            fingerprint=self._fingerprint,
            input_modalities=["text", "image"],
        )
        return pb.ListModelsResponse(models=[model])


async def _events(answer: Answer) -> AsyncIterator[pb.ChatEvent]:
    yield _accepted(answer)
    async for part in answer.parts():
        if part.piece is not None:
            yield pb.ChatEvent(delta=_delta(part.choice, part.piece))
        elif answer.call.generation.choices > 1:
            yield pb.ChatEvent(choice_finished=_choice_finished(part))
    yield pb.ChatEvent(finished=_finished(answer))


def call_from_proto(request: pb.ChatRequest, limits: LimitsConfig, vocab_size: int) -> ChatCall:
    """Raises EpdError naming the field as the proto calls it."""
    fields = Fields(_options(request.options), "options")
    generation = read_generation(fields, limits, vocab_size)
    fields.done()
    return ChatCall(request.model, _conversation(request, limits), generation, stream=True)


def _options(options: pb.GenerationOptions) -> dict[str, Any]:
    """As JSON would hold them, so that one set of checks serves both."""
    found: dict[str, Any] = {
        name: getattr(options, name) for name in _OPTIONAL if options.HasField(name)
    }
    return {
        **found,
        "logit_bias": {str(key): value for key, value in options.logit_bias.items()},
        "stop_token_ids": list(options.stop_token_ids),
        "stop": list(options.stop),
        "ignore_eos": options.ignore_eos,
        "logprobs": options.logprobs,
        "top_logprobs": options.top_logprobs,
        "response_format": {"type": "json_object"} if options.json_object else None,
        "guided_choice": list(options.guided_choice) or None,
    }


def _conversation(request: pb.ChatRequest, limits: LimitsConfig) -> Conversation:
    if len(request.messages) > limits.max_messages:
        raise invalid(f"messages: more than {limits.max_messages}", "messages")
    images: list[ImageSource] = []
    messages = []
    for i, message in enumerate(request.messages):
        role = _ROLES.get(message.role)
        if role is None:
            raise invalid(f"messages[{i}].role: is missing or unknown", f"messages[{i}].role")
        parts: list[TextPart | ImagePart] = []
        for j, part in enumerate(message.parts):
            kind = part.WhichOneof("kind")
            if kind == "text":
                parts.append(TextPart(part.text))
            elif kind == "image":
                param = f"messages[{i}].parts[{j}].image"
                if part.detail not in pb.ImageDetail.values():
                    detail = f"messages[{i}].parts[{j}].detail"
                    raise invalid(f"{detail}: {part.detail} is unknown", detail)
                low = part.detail == pb.IMAGE_DETAIL_LOW
                images.append(ImageSource(part.image, param, low_detail=low))
                parts.append(ImagePart(len(images) - 1))
            else:
                raise invalid("neither text nor image", f"messages[{i}].parts[{j}]")
        messages.append(ChatMessage(role, tuple(parts)))
    return conversation(messages, images, limits)


def _accepted(answer: Answer) -> pb.ChatEvent:
    usage = answer.usage
    return pb.ChatEvent(
        accepted=pb.ChatAccepted(
            request_id=answer.request_id,
            prompt_tokens=usage.prompt,
            image_tokens=usage.image,
        )
    )


def _delta(choice: int, piece: Piece) -> pb.ChatDelta:
    tokens = [convert.token_to_proto(token.token) for token in piece.tokens]
    return pb.ChatDelta(text=piece.text, tokens=tokens, choice=choice)


def _choice_finished(part: Part) -> pb.ChoiceFinished:
    return pb.ChoiceFinished(choice=part.choice, reason=convert.finish_to_proto(part.reason))


def _finished(answer: Answer) -> pb.ChatFinished:
    usage = answer.usage
    phases = [
        pb.Phase(
            name=phase.name,
            start_ms=phase.start_ms,
            duration_ms=phase.duration_ms,
            bytes=phase.bytes,
        )
        for phase in answer.timeline.phases
    ]
    return pb.ChatFinished(
        reason=convert.finish_to_proto(answer.reason),
        usage=pb.Usage(
            prompt_tokens=usage.prompt,
            completion_tokens=usage.completion,
            image_tokens=usage.image,
            cached_tokens=usage.cached,
        ),
        timeline=pb.Timeline(phases=phases),
    )
