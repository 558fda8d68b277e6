"""tools and tool_choice: what is forced, and refusals by name; the grammar of a call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from epd.config import LimitsConfig
from epd.errors import EpdError
from epd.sampling.grammar import Grammars
from gateway.fields import Fields
from gateway.tools import ToolUse, read_tools

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
    assert use.constraint is not None
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    matcher = Grammars(str(CHECKPOINT), 1100, (1019,)).build(use.constraint.grammar, ())
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
        use = read(tools=[tool()], tool_choice=choice)
        assert use is not None
        assert use.constraint is None
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
