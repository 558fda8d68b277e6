"""Answers in OpenAI's JSON: chunks of a stream, whole completions, errors."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import orjson

from epd.errors import EpdError
from epd.text.output import TextToken
from epd.text.vocabulary import Vocabulary
from gateway.answer import Answer, Part, Usage
from gateway.timeline import Timeline
from gateway.toolcalls import CallDelta

DONE = b"data: [DONE]\n\n"
_FLOOR = -9999.0
"""JSON has no -inf: what can't be sampled has this logprob."""


class ChunkForm:
    """How the streams of both completion APIs fail: by one event."""

    def error(self, error: EpdError) -> bytes:
        """What ends a stream that fails after it began."""
        return error_event(error)

    @staticmethod
    def refused(error: EpdError) -> bytes:
        """The whole stream of a request that nothing came of."""
        return error_event(error)


class Encoder(ChunkForm):
    """Encodes one answer. Chunks are bytes, ready for the wire."""

    def __init__(self, answer: Answer, model: str, vocabulary: Vocabulary) -> None:
        self._answer = answer
        self._vocabulary = vocabulary
        self._logprobs = answer.call.generation.sampling.logprobs
        self._head = {"id": answer.request_id, "created": int(time.time()), "model": model}

    def first(self) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return b"".join(
            self._chunk(choice, delta, None, None)
            for choice in range(self._answer.call.generation.choices)
        )

    def part(self, part: Part) -> bytes:
        if part.piece is None:
            return self._finish(part)
        logprobs = self._token_logprobs(part.piece.tokens) if self._logprobs else None
        delta: dict[str, Any] = {}
        if part.calls:
            delta["tool_calls"] = [_call_delta(call) for call in part.calls]
        elif not part.piece.text and not logprobs:
            return b""  # held back: it may become a call
        if part.piece.text or not part.calls:
            delta["content"] = part.piece.text
        return self._chunk(part.choice, delta, None, logprobs)

    def _finish(self, part: Part) -> bytes:
        extra: dict[str, Any] = {}
        # The timeline is the request's: it comes when that is over.
        if self._answer.call.timeline and self._answer.reason is not None:
            extra["timeline"] = timeline_json(self._answer.timeline)
        return self._chunk(part.choice, {}, _reason(part), None, extra)

    def last(self) -> bytes:
        """Usage chunk if asked for, and the end mark."""
        answer = self._answer
        if not answer.call.include_usage:
            return DONE
        body = {**self._chunk_head(), "choices": [], "usage": usage_json(answer.usage)}
        return event(body) + DONE

    def whole(self, parts: Sequence[Part]) -> bytes:
        """The body of an answer that is not streamed."""
        answer = self._answer
        choices = [
            self._choice(index, [part for part in parts if part.choice == index])
            for index in range(answer.call.generation.choices)
        ]
        body: dict[str, Any] = {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage_json(answer.usage),
        }
        if answer.call.timeline:
            body["timeline"] = timeline_json(answer.timeline)
        return orjson.dumps(body)

    def _choice(self, index: int, parts: Sequence[Part]) -> dict[str, Any]:
        pieces = [part.piece for part in parts if part.piece is not None]
        tokens = [token for piece in pieces for token in piece.tokens]
        text = "".join(piece.text for piece in pieces)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls := _whole_calls([call for part in parts for call in part.calls]):
            message |= {"content": text or None, "tool_calls": calls}
        return {
            "index": index,
            "message": message,
            "logprobs": self._token_logprobs(tokens) if self._logprobs else None,
            "finish_reason": _reason(parts[-1]),
        }

    def _chunk_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk"}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        reason: str | None,
        logprobs: dict[str, Any] | None,
        extra: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        body = {**self._chunk_head(), "choices": [choice], **(extra or {})}
        if self._answer.call.include_usage:
            body["usage"] = None
        return event(body)

    def _token_logprobs(self, tokens: Sequence[TextToken]) -> dict[str, Any]:
        return {"content": [self._token_logprob(token) for token in tokens], "refusal": None}

    def _token_logprob(self, token: TextToken) -> dict[str, Any]:
        sampled = token.token
        return {
            **self._entry(sampled.id, sampled.logprob, token.raw),
            "top_logprobs": [
                self._entry(index, logprob, self._vocabulary.raw(index))
                for index, logprob in sampled.top
            ],
        }

    def _entry(self, token_id: int, logprob: float | None, raw: bytes) -> dict[str, Any]:
        shown = raw or (
            self._vocabulary.name(token_id) if self._vocabulary.is_skipped(token_id) else b""
        )
        return {
            "token": shown.decode(errors="replace"),
            "logprob": finite(logprob),
            "bytes": list(raw),
        }


def _reason(part: Part) -> str:
    return "tool_calls" if part.called else str(part.reason)


def _call_delta(call: CallDelta) -> dict[str, Any]:
    if not call.id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _whole_calls(deltas: Sequence[CallDelta]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if delta.id:
            function = {"name": delta.name, "arguments": delta.arguments}
            calls.append({"id": delta.id, "type": "function", "function": function})
        else:
            calls[-1]["function"]["arguments"] += delta.arguments
    return calls


def error_event(error: EpdError) -> bytes:
    """What ends a stream that fails after it began: the error, then the end mark."""
    return event(error.openai_body()) + DONE


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached,
            "text_tokens": usage.prompt - usage.image,
            "image_tokens": usage.image,
            "audio_tokens": 0,
        },
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def timeline_json(timeline: Timeline) -> dict[str, Any]:
    return {
        "phases": [
            {
                "name": phase.name,
                "start_ms": round(phase.start_ms, 3),
                "duration_ms": round(phase.duration_ms, 3),
                "bytes": phase.bytes,
            }
            for phase in timeline.phases
        ]
    }


def finite(logprob: float | None) -> float:
    """Never NaN or infinite: JSON has neither."""
    return logprob if logprob is not None and _FLOOR < logprob < math.inf else _FLOOR


def event(body: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + orjson.dumps(body) + b"\n\n"
