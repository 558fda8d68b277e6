"""The public gRPC API: translation to and from what the HTTP API uses, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from epd.errors import EpdError, ErrorKind
from epd.rpc import convert
from epd.text.output import TextToken
from gateway import grpc_ids
from gateway.access import Access
from gateway.answer import Answer, Part
from gateway.chat import ChatService
from gateway.grpc_receipt import authorization
from gateway.grpc_request import (
    Checked,
    chat_call,
    completion_call,
    detokenize_call,
    tokenize_call,
)
from gateway.outcomes import beginning
from gateway.schema import ChatCall
from gateway.tokens import check_count
from protos.epd.v1 import gateway_pb2 as pb
from protos.epd.v1 import gateway_pb2_grpc as pb_grpc

SERVICE = "epd.v1.Gateway"
_Request = pb.ChatRequest | pb.CompletionRequest | Checked


class GatewayService(pb_grpc.GatewayServicer):
    """Same checks, same limits and same answers as over HTTP."""

    def __init__(
        self, service: ChatService, vocab_size: int, fingerprint: str, access: Access
    ) -> None:
        self._access = access
        self._service = service
        self._vocab_size = vocab_size
        self._fingerprint = fingerprint

    async def Chat(  # type: ignore[override]
        self, request: pb.ChatRequest | Checked, context: Any
    ) -> None:
        await self._answer(request, context, partial(self._call, chat_call, request))

    async def Complete(  # type: ignore[override]
        self, request: pb.CompletionRequest | Checked, context: Any
    ) -> None:
        await self._answer(request, context, partial(self._call, completion_call, request))

    def _call(self, read: Callable[..., ChatCall], request: Any) -> ChatCall:
        """Raises EpdError for what is wrong with the request."""
        if isinstance(request, Checked):
            return request.call
        return read(request, self._service.config.limits, self._vocab_size)

    async def Tokenize(
        self, request: pb.TokenizeRequest | Checked, context: Any
    ) -> pb.TokenizeResponse:
        service = self._service
        with self._access.admit(authorization(context)) as caller:
            async with service.receiving():
                with service.budget.hold(caller.salt) as hold:
                    hold.take(request.ByteSize())
                    call = self._call(tokenize_call, request)
                    service.check_model(call.model)
                    planned = await service.plan(call, grpc_ids.request_id(), hold)
        return pb.TokenizeResponse(
            ids=planned.token_ids,
            image_tokens=planned.image_tokens,
            max_context=service.preparer.max_context,
        )

    async def Detokenize(
        self, request: pb.DetokenizeRequest | Checked, context: Any
    ) -> pb.DetokenizeResponse:
        with self._access.admit(authorization(context)):
            ids = self._call(detokenize_call, request).prompt
            assert isinstance(ids, tuple)
            check_count(len(ids), self._service.preparer.max_context, "ids")
            text = self._service.tokenizer.decode(list(ids), skip_special_tokens=False)
        return pb.DetokenizeResponse(text=text)

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Any
    ) -> pb.ListModelsResponse:
        self._access.identify(authorization(context))
        model = pb.ModelInfo(
            id=self._service.model,
            max_context=self._service.preparer.max_context,
            fingerprint=self._fingerprint,
            input_modalities=self._service.input_modalities,
        )
        return pb.ListModelsResponse(models=[model])

    async def _answer(self, request: _Request, context: Any, read: Callable[[], ChatCall]) -> None:
        with ExitStack() as admitted:
            with beginning():
                caller = admitted.enter_context(self._access.admit(authorization(context)))
                await grpc_ids.tell(context, request.client_request_id)
            left_s = context.time_remaining()
            answer = await self._open(request, read, caller.salt, left_s)
            try:
                async for event in self._events(answer):
                    await self._write(event, context)
                answer.finish()
            finally:
                answer.cancel()

    async def _open(
        self,
        request: _Request,
        read: Callable[[], ChatCall],
        salt: bytes,
        left_s: float | None,
    ) -> Answer:
        service = self._service
        with service.budget.hold(salt) as hold:
            with beginning():
                hold.take(request.ByteSize())
                call = replace(read(), salt=salt)
            answer = await service.open(call, grpc_ids.request_id(), hold, left_s)
            hold.keep()
        return answer

    async def _events(self, answer: Answer) -> AsyncIterator[pb.ChatEvent]:
        asked, called = answer.call.generation, False
        with answer.served():
            yield _accepted(answer)
            async for part in answer.parts():
                if part.piece is not None:
                    yield self._delta(part, asked.sampling.logprobs)
                elif asked.choices > 1:
                    yield pb.ChatEvent(choice_finished=_choice_finished(part))
                if part.reason is not None and part.choice == 0:
                    called = part.called
            yield pb.ChatEvent(finished=_finished(answer, called))

    def _delta(self, part: Part, logprobs: bool) -> pb.ChatEvent:
        assert part.piece is not None
        delta = pb.ChatDelta(
            text=part.piece.text,
            tokens=[convert.token_to_proto(token.token) for token in part.piece.tokens],
            choice=part.choice,
        )
        if part.calls:
            delta.tool_calls.extend(
                pb.ToolCallDelta(
                    index=call.index, id=call.id, name=call.name, arguments=call.arguments
                )
                for call in part.calls
            )
        if logprobs:
            delta.texts.extend(self._text(token) for token in part.piece.tokens)
        return pb.ChatEvent(delta=delta)

    def _text(self, token: TextToken) -> pb.TokenText:
        raw = self._service.vocabulary.raw
        return pb.TokenText(raw=token.raw, top=[raw(index) for index, _ in token.token.top])

    async def _write(self, event: pb.ChatEvent, context: Any) -> None:
        """Flow control holds it back while the client doesn't read."""
        within_s = self._service.config.gateway.slow_reader_s
        try:
            async with asyncio.timeout(within_s):
                await context.write(event)
        except TimeoutError:
            reason = f"the client took nothing of its answer for {within_s:g} s"
            raise EpdError(ErrorKind.CANCELLED, reason) from None


def _accepted(answer: Answer) -> pb.ChatEvent:
    usage = answer.usage
    return pb.ChatEvent(
        accepted=pb.ChatAccepted(
            request_id=answer.request_id,
            prompt_tokens=usage.prompt,
            image_tokens=usage.image,
        )
    )


def _choice_finished(part: Part) -> pb.ChoiceFinished:
    reason = convert.finish_to_proto(part.reason)
    return pb.ChoiceFinished(choice=part.choice, reason=reason, tool_calls=part.called)


def _finished(answer: Answer, called: bool) -> pb.ChatFinished:
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
        tool_calls=called,
        usage=pb.Usage(
            prompt_tokens=usage.prompt,
            completion_tokens=usage.completion,
            image_tokens=usage.image,
            cached_tokens=usage.cached,
        ),
        timeline=pb.Timeline(phases=phases),
    )
