"""One request inside the gateway: what was planned, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from epd.jobs import FinishReason, ImageItem, SampledToken, SamplingParams


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """Everything that the stages need; `images[i]` is the file of `items[i]`."""

    request_id: str
    token_ids: tuple[int, ...]
    items: tuple[ImageItem, ...]
    images: tuple[bytes, ...]
    sampling: SamplingParams
    choices: int = 1
    """Outputs of this prompt; `sampling` is that of choice 0."""
    streamed: bool = False
    """The client gets the output as it comes."""
    image_params: tuple[str, ...] = ()
    """Where the client wrote each image, for errors that only decoding finds."""
    prompt_param: str = "messages"
    grammar_param: str | None = None
    """The field that asked for `sampling.grammar`."""
    salt: bytes = b""
    arrival_ms: int = 0
    """Unix time of the request's receipt. Decode preempts the youngest."""

    def image_param(self, index: int) -> str | None:
        return self.image_params[index] if index < len(self.image_params) else None

    @property
    def image_tokens(self) -> int:
        return sum(item.rows for item in self.items)


@dataclass(frozen=True, slots=True)
class Accepted:
    """Prefill reserved memory for the request. Comes once, first."""

    cached_tokens: int
    weight: ClassVar[int] = 0


@dataclass(frozen=True, slots=True)
class NewTokens:
    """More output, in order, without gaps or repeats."""

    tokens: tuple[SampledToken, ...]
    choice: int = 0

    @property
    def weight(self) -> int:
        """How large it is, roughly: tokens, and the alternatives to each."""
        return sum(1 + len(token.top) for token in self.tokens)


@dataclass(frozen=True, slots=True)
class Ended:
    """The output of a choice is complete; nothing of it follows."""

    reason: FinishReason
    choice: int = 0
    weight: ClassVar[int] = 0


Event = Accepted | NewTokens | Ended


def joined(events: Sequence[Event]) -> list[Event]:
    """The same, with neighbours of one choice made one."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if (
            isinstance(event, NewTokens)
            and isinstance(last, NewTokens)
            and event.choice == last.choice
        ):
            found[-1] = NewTokens((*last.tokens, *event.tokens), event.choice)
        else:
            found.append(event)
    return found
