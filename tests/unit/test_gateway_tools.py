"""tools and tool_choice: what is forced, and refusals by name; the grammar of a call."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from epd.config import LimitsConfig
from epd.errors import EpdError
from epd.jobs import Grammar, GrammarKind
from epd.sampling.grammar import Grammars
from gateway.constraints import Constraint
from gateway.fields import Fields
from gateway.schema import parse_chat
from gateway.tools import ToolUse, call_grammar, read_tools

CHECKPOINT = Path(__file__).parents[2] / "demo" / "checkpoint"
LIMITS = LimitsConfig(max_tools=2)


def tool(name: str = "weather", **more: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/City"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"City": {"enum": ["Bern", "Ulm"]}},
    }
    function = {"name": name, "description": "d", "parameters": parameters, **more}
    return {"type": "function", "function": function}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def read(**fields: Any) -> ToolUse | None:
    source = Fields(fields, "")
    use = read_tools(source, LIMITS)
    source.done()
    return use


def accepts(use: ToolUse | None, text: str) -> bool:
    """Whether the grammar takes this whole text, and may end there."""
    assert use is not None
    return fits(use.constraint, text)


def fits(constraint: Constraint | None, text: str) -> bool:
    assert constraint is not None
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    matcher = Grammars(str(CHECKPOINT), 1100, (1019,)).build(constraint.grammar, ())
    for token in tokenizer.encode(text, add_special_tokens=False).ids:
        if not matcher.allowed()[token]:
            return False
        matcher.advance(token)
    return bool(matcher.allowed()[1019])


def call(name: str = "weather", city: str = "Bern") -> str:
    body = json.dumps({"name": name, "arguments": {"city": city}})
    return f"<tool_call>\n{body}\n</tool_call>"


def test_free_and_forbidden() -> None:
    assert read() is None
    assert read(tools=[]) is None
    assert read(tools=[tool()], tool_choice="none") is None
    for choice in (None, "auto"):
        use = read(tools=[tool(strict=False)], tool_choice=choice)
        assert use is not None
        assert use.constraint is None
        assert not use.single
        assert [shown.name for shown in use.tools] == ["weather"]


def test_required_takes_any_of_them_once_or_more() -> None:
    use = read(tools=[tool(), tool("other")], tool_choice="required")
    assert accepts(use, call())
    assert accepts(use, call("other", "Ulm"))
    assert accepts(use, call() + "\n" + call("other"))
    for wrong in (call("third"), call(city="Rome"), "no call", ""):
        assert not accepts(use, wrong)
    single = read(tools=[tool()], tool_choice="required", parallel_tool_calls=False)
    assert accepts(single, call())
    assert not accepts(single, call() + "\n" + call())


def test_free_calls_of_a_strict_tool_fit_its_schema() -> None:
    for choice in (None, "auto"):
        use = read(tools=[tool(strict=True), tool("other")], tool_choice=choice)
        for text in ("", "no < tool_call>", call(), f"Look.\n{call()}\n{call(city='Ulm')} So."):
            assert accepts(use, text)
        assert accepts(use, call() + call("other", "Rome")), "only strict tools are held to it"
        for wrong in (call(city="Rome"), call() + call(city="Rome"), call("third"), "<tool_call>x"):
            assert not accepts(use, f"Look. {wrong}")
    assert use is not None
    assert use.constraint is not None
    assert use.constraint.param == "tools"
    assert use.constraint.trial == Grammar(GrammarKind.LARK, call_grammar([use.tools[0]], False))


@pytest.mark.parametrize(
    ("ref", "fits", "fits_not"),
    [
        ("#", {"city": "Bern", "next": {"city": "Ulm"}}, {"city": "Bern", "next": {}}),
        ("#/properties/city", {"city": "Bern", "next": "Ulm"}, {"city": "Bern", "next": "Rome"}),
        ("#/$defs/City", {"city": "Bern", "next": "Ulm"}, {"city": "Bern", "next": "Rome"}),
    ],
)
def test_references_to_the_root_are_to_the_parameters_own(
    ref: str, fits: dict[str, Any], fits_not: dict[str, Any]
) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/City"}, "next": {"$ref": ref}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"City": {"enum": ["Bern", "Ulm"]}},
    }
    use = read(tools=[tool(parameters=schema)], tool_choice="required")

    def made(arguments: dict[str, Any]) -> str:
        body = json.dumps({"name": "weather", "arguments": arguments})
        return f"<tool_call>\n{body}\n</tool_call>"

    assert accepts(use, made(fits))
    assert not accepts(use, made(fits_not))


FORM: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {
        "name": "found",
        "schema": {
            "type": "object",
            "properties": {"colour": {"$ref": "#/$defs/Colour"}},
            "required": ["colour"],
            "additionalProperties": False,
            "$defs": {"Colour": {"enum": ["red", "a <tool_call> b"]}},
        },
    },
}


def formed(**fields: Any) -> Constraint | None:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], **fields}
    return parse_chat(body, LIMITS, 1100).generation.constraint


def test_beside_tools_an_answer_is_calls_or_has_the_form() -> None:
    answer = '{"colour": "red"}'
    found = formed(tools=[tool(strict=True), tool("other")], response_format=FORM)
    for text in (
        answer,
        call(),
        f"{call()}\n{call('other', 'Rome')}",
        answer.replace("red", "a <tool_call> b"),
    ):
        assert fits(found, text), text
    for text in (
        "",
        "Red.",
        call(city="Rome"),
        call("third"),
        f"{call()}\n{answer}",
        answer + call(),
    ):
        assert not fits(found, text), text
    single = formed(tools=[tool()], response_format=FORM, parallel_tool_calls=False)
    assert fits(single, call(city="Rome")), "it isn't strict"
    assert not fits(single, f"{call()}\n{call()}")
    for kind in ("json_object", "text"):
        plain = formed(tools=[tool()], response_format={"type": kind})
        assert plain is None or fits(plain, '{"a": [1, 2]}')


def test_beside_forced_calls_and_without_tools_nothing_changes() -> None:
    for choice in ("required", named("weather")):
        forced = {"tools": [tool()], "tool_choice": choice}
        assert formed(**forced, response_format=FORM) == formed(**forced)
    assert formed(tools=[tool()], tool_choice="none", response_format=FORM) == formed(
        response_format=FORM
    )


def test_what_is_about_all_of_the_output_is_refused_beside_tools() -> None:
    for field, value in (("guided_json", {}), ("guided_regex", "a"), ("guided_choice", ["a"])):
        with pytest.raises(EpdError) as caught:
            formed(tools=[tool()], **{field: value})
        assert caught.value.param == field


def test_the_form_and_strict_tools_are_tried_out_each_by_its_name() -> None:
    tools = [tool(strict=True), tool("other")]
    found, alone = formed(tools=tools, response_format=FORM), formed(response_format=FORM)
    free = read(tools=tools)
    assert found is not None
    assert alone is not None
    assert free is not None
    assert (found.param, found.trial) == ("response_format.json_schema.schema", None)
    assert found.beside == replace(alone, beside=free.constraint)
    assert free.constraint is not None
    loose = formed(tools=[tool()], response_format=FORM)
    assert loose is not None
    assert loose.beside == alone


def test_one_call_at_most_is_a_rule_for_free_calls_too() -> None:
    for more in ({}, {"tool_choice": "auto"}):
        use = read(tools=[tool()], parallel_tool_calls=False, **more)
        assert use is not None
        assert use.single
    forced = read(tools=[tool()], parallel_tool_calls=False, tool_choice="required")
    assert forced is not None
    assert not forced.single, "its grammar knows"


def test_a_named_function_is_the_only_one() -> None:
    use = read(tools=[tool(), tool("other")], tool_choice=named("other"))
    assert accepts(use, call("other"))
    assert not accepts(use, call())
    assert not accepts(use, call("other") + "\n" + call("other"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": 5}, "tools"),
        ({"tools": [tool(), tool("a"), tool("b")]}, "tools"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool(), tool()]}, "tools[1].function.name"),
        ({"tools": [tool(parameters="x")]}, "tools[0].function.parameters"),
        ({"tools": [tool(strict="yes")]}, "tools[0].function.strict"),
        ({"tools": [tool(x=1)]}, "tools[0].function.x"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": named("x")}, "tool_choice.function.name"),
        ({"tools": [tool()], "parallel_tool_calls": 1}, "parallel_tool_calls"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(EpdError) as caught:
        read(**fields)
    assert caught.value.param == param
