"""Grammars from anyone: tried out in a process that can be killed, refused by the field's name."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from epd.errors import EpdError, ErrorKind
from epd.jobs import Grammar, GrammarKind
from epd.models.spec import read_spec
from epd.sampling.grammar import Grammars
from gateway.grammars import GrammarChecker

DEMO = Path(__file__).resolve().parents[2] / "demo" / "checkpoint"
EXPONENTIAL = json.dumps(
    {"allOf": [{"type": "string", "pattern": "a.{%d}b" % i} for i in range(30)]}  # noqa: UP031
)
ENDLESS = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"$ref": "#"}},
        "required": ["a"],
        "additionalProperties": False,
    }
)


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    made = GrammarChecker(read_spec(DEMO))
    yield made
    made.close()


async def test_hostile_grammars_are_refused_and_the_next_one_is_served(
    checker: GrammarChecker,
) -> None:
    hostile = {
        EXPONENTIAL: (GrammarKind.JSON_SCHEMA, "takes more than 2 s to compile"),
        ENDLESS: (GrammarKind.JSON_SCHEMA, "can't be followed"),
        '{"$ref":"#"}': (GrammarKind.JSON_SCHEMA, "can't be followed"),
        "a{1000000}": (GrammarKind.REGEX, "can't be followed"),
        "a{190000}": (GrammarKind.REGEX, "too costly"),
        "a{99999}": (GrammarKind.REGEX, "too costly"),
    }
    for text, (kind, reason) in hostile.items():
        with pytest.raises(EpdError) as caught:
            await checker.check(Grammar(kind, text), "guided")
        assert caught.value.kind is ErrorKind.INVALID_REQUEST
        assert caught.value.param == "guided"
        assert caught.value.message.startswith("guided: ")
        assert reason in caught.value.message
        assert "<state>" not in caught.value.message
        await checker.check(Grammar(GrammarKind.REGEX, "yes|no"), "guided")


def test_a_grammar_that_fails_is_not_complete() -> None:
    spec = read_spec(DEMO)
    grammars = Grammars(str(spec.path), spec.vocab_size, spec.eos_token_ids)
    matcher = grammars.build(Grammar(GrammarKind.JSON_SCHEMA, ENDLESS), ())
    matcher.advance(int(matcher.allowed().nonzero()[0][0]))
    assert not matcher.complete
    with pytest.raises(EpdError, match="can't be followed"):
        matcher.allowed()
