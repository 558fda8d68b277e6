"""POST /v1/completions: a prompt as it is, without a chat template; text or token ids.

A text is a text: control tokens typed in it stay text, as in a chat. Who wants control
tokens sends ids.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson

from epd.config import LimitsConfig
from epd.errors import invalid
from epd.text.output import TextToken
from epd.text.vocabulary import Vocabulary
from gateway.answer import Answer, Part
from gateway.content import Conversation, check_text
from gateway.fields import Fields
from gateway.openai import DONE, ChunkForm, event, finite, usage_json
from gateway.schema import (
    ACCEPTED,
    NOT_SERVED,
    ChatCall,
    limit_names,
    load_json,
    read_generation,
    read_streaming,
)

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""
_MOST_LOGPROBS = 5
_NOT_SERVED: dict[str, Sequence[Any]] = {**NOT_SERVED, "suffix": ("",), "prompt_embeds": ()}


def parse_completion(body: bytes, limits: LimitsConfig, vocab_size: int) -> ChatCall:
    """Check a JSON body.

    Raises:
        EpdError: INVALID_REQUEST naming the field.
    """
    value = load_json(body)
    if isinstance(value, dict):
        value = _as_chat(value)
    fields = Fields(value, "")
    model = fields.required_string("model")
    prompt, names = read_prompt(fields, "prompt", vocab_size), limit_names(fields)
    generation = read_generation(fields, limits, vocab_size)
    if generation.max_tokens is None:
        generation = replace(generation, max_tokens=DEFAULT_MAX_TOKENS)
    stream, include_usage = read_streaming(fields)
    fields.refuse(_NOT_SERVED)
    for name in ACCEPTED:
        fields.take(name)
    fields.done()
    said = Conversation((), ())
    return ChatCall(model, said, generation, stream, include_usage, prompt=prompt, names=names)


def _as_chat(body: dict[str, Any]) -> dict[str, Any]:
    """`logprobs` is a number here; the chat API's two fields say the same."""
    if "top_logprobs" in body:
        raise invalid("top_logprobs: is unknown", "top_logprobs")
    number = body.get("logprobs")
    if number is None:
        return body
    if isinstance(number, bool) or not isinstance(number, int):
        raise invalid("logprobs: must be an integer", "logprobs")
    if not 0 <= number <= _MOST_LOGPROBS:
        raise invalid(f"logprobs: {number} is not between 0 and {_MOST_LOGPROBS}", "logprobs")
    return {**body, "logprobs": True, "top_logprobs": number}


def read_prompt(fields: Fields, name: str, vocab_size: int) -> str | tuple[int, ...]:
    """One prompt: a string, ids, or a list with one of these."""
    value = fields.take(name)
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        check_text(value, fields.param(name))
        if not value:
            raise fields.wrong(name, "is empty")
        return value
    if value is None:
        raise fields.wrong(name, "is missing")
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        raise fields.wrong(name, "one prompt a request")
    return read_ids(fields, name, value, vocab_size)


def read_ids(fields: Fields, name: str, value: Any, vocab_size: int) -> tuple[int, ...]:
    """Token ids of the vocabulary, at least one."""
    if not isinstance(value, list) or not value:
        raise fields.wrong(name, "must be a text or an array of token ids")
    for at, item in enumerate(value):
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < vocab_size:
            raise fields.wrong(f"{name}[{at}]", f"must be an id from 0 to {vocab_size - 1}")
    return tuple(value)


class CompletionEncoder(ChunkForm):
    """Encodes one answer in the form of /v1/completions."""

    def __init__(self, answer: Answer, model: str, vocabulary: Vocabulary) -> None:
        self._answer = answer
        self._vocabulary = vocabulary
        self._logprobs = answer.call.generation.sampling.logprobs
        choices = answer.call.generation.choices
        self._offsets = [0] * choices
        # A character in several tokens is one of the text.
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(choices)]
        self._head = {
            "id": answer.request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def first(self) -> bytes:
        return b""

    def part(self, part: Part) -> bytes:
        body: dict[str, Any] = {**self._head, "choices": [self._choice(part.choice, [part])]}
        if self._answer.call.include_usage:
            body["usage"] = None
        return event(body)

    def last(self) -> bytes:
        if not self._answer.call.include_usage:
            return DONE
        usage = usage_json(self._answer.usage)
        return event({**self._head, "choices": [], "usage": usage}) + DONE

    def whole(self, parts: Sequence[Part]) -> bytes:
        choices = [
            self._choice(index, [part for part in parts if part.choice == index])
            for index in range(self._answer.call.generation.choices)
        ]
        usage = usage_json(self._answer.usage)
        return orjson.dumps({**self._head, "choices": choices, "usage": usage})

    def _choice(self, index: int, parts: Sequence[Part]) -> dict[str, Any]:
        pieces = [part.piece for part in parts if part.piece is not None]
        tokens = [token for piece in pieces for token in piece.tokens]
        reason = parts[-1].reason
        return {
            "index": index,
            "text": "".join(piece.text for piece in pieces),
            "logprobs": self._token_logprobs(index, tokens) if self._logprobs else None,
            "finish_reason": None if reason is None else str(reason),
        }

    def _token_logprobs(self, index: int, tokens: Sequence[TextToken]) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(self._decoders[index].decode(token.raw))
        return {
            "tokens": [self._shown(token.token.id, token.raw) for token in tokens],
            "token_logprobs": [finite(token.token.logprob) for token in tokens],
            "top_logprobs": [
                {self._shown(i, self._vocabulary.raw(i)): finite(p) for i, p in token.token.top}
                for token in tokens
            ],
            "text_offset": offsets,
        }

    def _shown(self, token_id: int, raw: bytes) -> str:
        return (raw or self._vocabulary.name(token_id)).decode(errors="replace")
