"""response_format and guided_*: which grammar they mean, and refusals by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from epd.config import LimitsConfig
from epd.errors import EpdError
from epd.jobs import GrammarKind
from gateway.constraints import Constraint, read_constraint
from gateway.fields import Fields

LIMITS = LimitsConfig(max_grammar_bytes=100, max_guided_choices=2)
SCHEMA = {"type": "object"}


def read(**fields: Any) -> Constraint | None:
    source = Fields(fields, "")
    constraint = read_constraint(source, LIMITS)
    source.done()
    return constraint


def schema_format(**fields: Any) -> dict[str, Any]:
    inner = {"name": "x", "schema": SCHEMA, **fields}
    return {"type": "json_schema", "json_schema": inner}


def test_free_output() -> None:
    assert read() is None
    assert read(response_format=None, guided_choice=None) is None
    assert read(response_format={"type": "text"}) is None


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", "response_format.type"),
        (
            {"response_format": schema_format(strict=True, description="d")},
            "json_schema",
            "response_format.json_schema.schema",
        ),
        ({"guided_json": SCHEMA}, "json_schema", "guided_json"),
        ({"guided_regex": "a+"}, "regex", "guided_regex"),
        ({"guided_choice": ["a", "b"]}, "lark", "guided_choice"),
    ],
)
def test_each_field_becomes_a_grammar(fields: dict[str, Any], kind: str, param: str) -> None:
    constraint = read(**fields)
    assert constraint is not None
    assert (str(constraint.grammar.kind), constraint.param) == (kind, param)
    if kind == "json_schema":
        assert json.loads(constraint.grammar.text) == SCHEMA


def test_choices_are_literals() -> None:
    constraint = read(guided_choice=['say "a"', "b\n|c"])
    assert constraint is not None
    assert constraint.grammar.kind is GrammarKind.LARK
    assert constraint.grammar.text == r'start: "say \"a\"" | "b\n|c"'


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "text", "x": 1}}, "response_format.x"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.name"),
        ({"response_format": schema_format(schema=5)}, "response_format.json_schema.schema"),
        ({"response_format": schema_format(schema=None)}, "response_format.json_schema.schema"),
        ({"response_format": schema_format(strict="y")}, "response_format.json_schema.strict"),
        ({"guided_json": "text"}, "guided_json"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_regex": "a" * 101}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", "b", "c"]}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(EpdError) as caught:
        read(**fields)
    assert caught.value.param == param
