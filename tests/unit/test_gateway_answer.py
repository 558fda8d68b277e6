"""Events of one answer become parts: what waits together is sent together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from tokenizers import Tokenizer, decoders, models

from epd.errors import EpdError, ErrorKind
from epd.jobs import FinishReason, SampledToken, SamplingParams
from epd.text.output import OutputText
from epd.text.vocabulary import Vocabulary
from gateway.answer import Answer, Part
from gateway.request import Accepted, Ended, Event, NewTokens, PlannedRequest, joined
from gateway.timeline import Timeline
from gateway.waste import Door

STOP = FinishReason.STOP


def new(*ids: int, choice: int = 0) -> NewTokens:
    return NewTokens(tuple(SampledToken(token_id) for token_id in ids), choice)


def test_neighbours_of_one_choice_are_joined_and_nothing_else() -> None:
    events: list[Event] = [
        Accepted(0), new(1), new(2, 3), new(4, choice=1), new(5, choice=1), new(6),
        Ended(STOP), new(7, choice=1), Ended(STOP, 1),
    ]  # fmt: skip
    assert joined(events) == [
        Accepted(0), new(1, 2, 3), new(4, 5, choice=1), new(6),
        Ended(STOP), new(7, choice=1), Ended(STOP, 1),
    ]  # fmt: skip
    assert joined([]) == []


class LaggingRun:
    """A run whose events all wait already, each token in an event of its own."""

    def __init__(self, events: list[Event]) -> None:
        self.events = events

    async def ready(self) -> list[Event]:
        found, self.events = self.events, []
        assert found, "asked again after the end"
        return found

    def cancel(self, reason: str) -> None:
        pass


class FailedRun:
    """One that ended with a fault before it was accepted."""

    def __init__(self, fault: EpdError) -> None:
        self.fault = fault

    async def next(self) -> Event:
        raise self.fault

    def cancel(self, reason: str) -> None:
        pass


def answer_of(run: LaggingRun | FailedRun, choices: int, visit: Any) -> Answer:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate("abcdef")}, "a"))
    tokenizer.decoder = decoders.Fuse()
    texts = [OutputText(tokenizer, Vocabulary(tokenizer), (), ()) for _ in range(choices)]
    request = PlannedRequest("test", (1, 2), (), (), SamplingParams(), choices)
    call = SimpleNamespace(tools=(), stream=True)
    hold = SimpleNamespace(release=lambda: None)
    untyped: Any = Answer
    answer: Answer = untyped(
        call,
        request,
        run,
        texts,
        timeline=Timeline(),
        hold=hold,
        visit=visit,
        let_go=lambda: None,
    )
    return answer


async def parts_of(events: list[Event], choices: int) -> list[Part]:
    visit = await Door(held_s=1.0).enter(b"")
    answer = answer_of(LaggingRun(events), choices, visit)
    return [part async for part in answer.parts()]


async def test_tokens_that_wait_are_one_part() -> None:
    parts = await parts_of([new(1), new(2), new(3), Ended(STOP)], choices=1)
    pieces = [part.piece for part in parts if part.piece]
    assert [(piece.text, len(piece.tokens)) for piece in pieces] == [("bcd", 3)]
    assert parts[-1].reason is STOP


async def test_choices_that_wait_together_stay_apart() -> None:
    waiting: list[Event] = [
        new(1), new(2), new(4, choice=1), new(5, choice=1), Ended(STOP, 1), new(3), Ended(STOP),
    ]  # fmt: skip
    parts = await parts_of(waiting, choices=2)
    said = [(part.choice, part.piece.text) for part in parts if part.piece]
    assert said == [(0, "bc"), (1, "ef"), (0, "d")]
    assert [part.choice for part in parts if part.reason] == [1, 0]


@pytest.mark.parametrize(
    ("fault", "given_up"),
    [
        (EpdError(ErrorKind.DEADLINE_EXCEEDED, "its own", by_client=True), True),
        (EpdError(ErrorKind.DEADLINE_EXCEEDED, "the gateway's"), False),
        (EpdError(ErrorKind.STAGE_UNAVAILABLE, "ours"), False),
    ],
)
async def test_a_client_whose_own_deadline_passes_has_given_up(
    fault: EpdError, given_up: bool
) -> None:
    """As far as the door is concerned: else little time would be a way past it."""
    visit = Mock()
    answer = answer_of(FailedRun(fault), 1, visit)
    with pytest.raises(EpdError):
        await answer.accepted()
    answer.cancel()
    visit.end.assert_called_once_with(given_up=given_up, answered=False)
