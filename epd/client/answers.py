"""What a client gets: deltas of a stream, or a whole answer gathered from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from epd.jobs import FinishReason, SampledToken
from epd.rpc import convert
from protos.epd.v1 import gateway_pb2 as pb


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens; the prompt's hold those of the images."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    image_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CallDelta:
    """Some more of one tool call. The first of a call has its id and name."""

    index: int
    arguments: str
    id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class TokenText:
    """Bytes of a token and of the likely ones beside it."""

    raw: bytes
    top: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """Some more text of one of the n answers, and its tokens. `texts` go with `tokens`,
    where logprobs were asked for."""

    text: str
    tokens: tuple[SampledToken, ...] = ()
    choice: int = 0
    calls: tuple[CallDelta, ...] = ()
    texts: tuple[TokenText, ...] = ()


@dataclass(slots=True)
class Answer:
    """A whole answer. Each list has one entry for each of the n."""

    request_id: str = ""
    texts: list[str] = field(default_factory=list)
    reasons: list[FinishReason | None] = field(default_factory=list)
    tokens: list[list[SampledToken]] = field(default_factory=list)
    calls: list[list[pb.ToolCall]] = field(default_factory=list)
    """Tool calls, ready to be put into the next request's `assistant` message."""
    called: list[bool] = field(default_factory=list)
    """It ended with tool calls."""
    usage: Usage = Usage()

    @property
    def text(self) -> str:
        return self.texts[0]

    @property
    def reason(self) -> FinishReason | None:
        return self.reasons[0]


class Gathered:
    """Events become an answer."""

    def __init__(self, options: dict[str, Any]) -> None:
        count = max(int(options.get("n") or 1), 1)
        self.answer = Answer(
            texts=[""] * count,
            reasons=[None] * count,
            tokens=[[] for _ in range(count)],
            calls=[[] for _ in range(count)],
            called=[False] * count,
        )

    def add(self, event: pb.ChatEvent) -> None:
        answer, kind = self.answer, event.WhichOneof("kind")
        if kind == "accepted":
            answer.request_id = event.accepted.request_id
        elif kind == "delta":
            self._delta(delta_of(event.delta))
        elif kind == "choice_finished":
            ended = event.choice_finished
            answer.reasons[ended.choice] = convert.finish_from_proto(ended.reason)
            answer.called[ended.choice] = ended.tool_calls
        elif kind == "finished":
            answer.reasons[0] = convert.finish_from_proto(event.finished.reason)
            answer.called[0] = event.finished.tool_calls
            usage = event.finished.usage
            answer.usage = Usage(
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                image_tokens=usage.image_tokens,
                cached_tokens=usage.cached_tokens,
            )

    def _delta(self, delta: Delta) -> None:
        answer, choice = self.answer, delta.choice
        answer.texts[choice] += delta.text
        answer.tokens[choice] += delta.tokens
        for call in delta.calls:
            if call.id:
                answer.calls[choice].append(pb.ToolCall(id=call.id, name=call.name))
            answer.calls[choice][-1].arguments += call.arguments


def delta_of(message: pb.ChatDelta) -> Delta:
    return Delta(
        message.text,
        tuple(convert.token_from_proto(token) for token in message.tokens),
        message.choice,
        tuple(
            CallDelta(call.index, call.arguments, call.id, call.name) for call in message.tool_calls
        ),
        tuple(TokenText(text.raw, tuple(text.top)) for text in message.texts),
    )
