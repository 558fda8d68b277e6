"""What the output must look like: response_format and the guided_* extensions, as a grammar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from epd.config import LimitsConfig
from epd.errors import invalid, too_many
from epd.jobs import Grammar, GrammarKind
from gateway.fields import Fields, as_json

_ANY_OBJECT = '{"type":"object"}'


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar and the field that asked for it."""

    grammar: Grammar
    param: str
    trial: Grammar | None = None
    """Tried out before it is served, in place of `grammar`, where that begins with any text."""
    beside: Constraint | None = None
    """What `grammar` was made of, tried out before it: what is wrong has its own field's name."""
    form: bool = False
    """Of what the model writes where it calls no tool."""


def read_constraint(fields: Fields, limits: LimitsConfig) -> Constraint | None:
    """At most one field may constrain the output.

    Raises:
        EpdError: INVALID_REQUEST naming the field.
    """
    readers = (_response_format, _guided_json, _guided_regex, _guided_choice)
    found = [constraint for read in readers if (constraint := read(fields, limits)) is not None]
    if len(found) > 1:
        first, second = found[:2]
        reason = f"{second.param}: can't be used together with {first.param}"
        raise invalid(reason, second.param)
    for constraint in found:
        check_size(constraint, limits)
    return found[0] if found else None


def check_size(constraint: Constraint, limits: LimitsConfig) -> None:
    """Raises EpdError naming the field of a grammar that is too large to compile."""
    if (size := len(constraint.grammar.text.encode())) > limits.max_grammar_bytes:
        raise too_many(constraint.param, size, limits.max_grammar_bytes, "bytes as a grammar")


def choice_grammar(choices: Sequence[str]) -> Grammar:
    """Exactly one of these texts."""
    return Grammar(GrammarKind.LARK, "start: " + " | ".join(quoted(choice) for choice in choices))


def quoted(text: str) -> str:
    """A literal of Lark: strings are written as in JSON."""
    return orjson.dumps(text).decode()


def schema_text(fields: Fields, name: str, value: Any) -> str:
    """A JSON Schema as compact JSON."""
    if not isinstance(value, Mapping):
        raise fields.wrong(name, "must be a JSON Schema (an object)")
    return as_json(value, fields.param(name))


def _response_format(fields: Fields, limits: LimitsConfig) -> Constraint | None:
    value = fields.take("response_format")
    if value is None:
        return None
    inner = Fields(value, fields.param("response_format"))
    kind = inner.required_string("type")
    constraint = None
    if kind == "json_object":
        grammar = Grammar(GrammarKind.JSON_SCHEMA, _ANY_OBJECT)
        constraint = Constraint(grammar, inner.param("type"), form=True)
    elif kind == "json_schema":
        constraint = _json_schema(inner)
    elif kind != "text":
        raise inner.wrong("type", f"{kind!r} is not supported; text, json_object or json_schema")
    inner.done()
    return constraint


def _json_schema(outer: Fields) -> Constraint:
    inner = Fields(outer.take("json_schema") or {}, outer.param("json_schema"))
    return named_schema(inner)


def named_schema(inner: Fields) -> Constraint:
    """OpenAI's {name, description, strict, schema}. The grammar is enforced, strict or not."""
    inner.required_string("name")
    inner.string("description")
    inner.boolean("strict")
    schema = inner.take("schema")
    if schema is None:
        raise inner.wrong("schema", "is missing")
    text = schema_text(inner, "schema", schema)
    inner.done()
    return Constraint(Grammar(GrammarKind.JSON_SCHEMA, text), inner.param("schema"), form=True)


def _guided_json(fields: Fields, limits: LimitsConfig) -> Constraint | None:
    value = fields.take("guided_json")
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise fields.wrong("guided_json", f"is no JSON: {error}") from error
    text = schema_text(fields, "guided_json", value)
    return Constraint(Grammar(GrammarKind.JSON_SCHEMA, text), fields.param("guided_json"))


def _guided_regex(fields: Fields, limits: LimitsConfig) -> Constraint | None:
    value = fields.string("guided_regex")
    if value is None:
        return None
    return Constraint(Grammar(GrammarKind.REGEX, value), fields.param("guided_regex"))


def _guided_choice(fields: Fields, limits: LimitsConfig) -> Constraint | None:
    value = fields.array("guided_choice")
    if value is None:
        return None
    if not 1 <= len(value) <= limits.max_guided_choices:
        reason = f"takes 1 to {limits.max_guided_choices} strings, not {len(value)}"
        raise fields.wrong("guided_choice", reason)
    if not all(isinstance(choice, str) and choice for choice in value):
        raise fields.wrong("guided_choice", "must hold strings that are not empty")
    if (size := sum(map(len, value))) > limits.max_grammar_bytes:
        raise too_many(fields.param("guided_choice"), size, limits.max_grammar_bytes, "characters")
    return Constraint(choice_grammar(value), fields.param("guided_choice"))
