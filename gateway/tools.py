"""`tools`, `tool_choice`, `parallel_tool_calls`: what the model may or must call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from epd.config import LimitsConfig
from epd.errors import invalid, too_many
from epd.jobs import Grammar, GrammarKind
from epd.text.messages import Tool
from gateway.constraints import Constraint, check_size, quoted
from gateway.fields import Fields
from gateway.toolcalls import CLOSE, OPEN

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FORMAT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """`tools` are shown to the model; a call is forced where `constraint` is there."""

    tools: tuple[Tool, ...]
    constraint: Constraint | None


def read_tools(fields: Fields, limits: LimitsConfig) -> ToolUse | None:
    """None where the model is not to call anything.

    Raises:
        EpdError: INVALID_REQUEST naming the field.
    """
    value = fields.array("tools") or ()
    choice = fields.take("tool_choice")
    parallel = fields.boolean("parallel_tool_calls", default=True)
    if len(value) > limits.max_tools:
        raise too_many(fields.param("tools"), len(value), limits.max_tools, "tools")
    tools = [_tool(item, fields.param(f"tools[{i}]")) for i, item in enumerate(value)]
    names = [tool.name for tool in tools]
    for at, name in enumerate(names):
        if name in names[:at]:
            raise fields.wrong(f"tools[{at}].function.name", f"{name!r} comes twice")
    wanted = _choice(fields, choice, tools)
    if not tools or wanted is None:
        return None
    constraint = None
    if wanted:
        several = parallel and len(wanted) == len(tools) and choice == "required"
        grammar = Grammar(GrammarKind.LARK, call_grammar(wanted, several))
        constraint = Constraint(grammar, fields.param("tools"))
        check_size(constraint, limits)
    return ToolUse(tuple(tools), constraint)


def _tool(value: Any, path: str) -> Tool:
    outer = Fields(value, path)
    if (kind := outer.required_string("type")) != "function":
        raise outer.wrong("type", f"{kind!r} is not supported; function")
    inner = Fields(outer.take("function") or {}, outer.param("function"))
    outer.done()
    name = inner.required_string("name")
    if not _NAME.fullmatch(name):
        raise inner.wrong("name", "must be 1 to 64 of a-z, A-Z, 0-9, '_', '.' and '-'")
    description = inner.string("description") or ""
    inner.boolean("strict")
    parameters = inner.take("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise inner.wrong("parameters", "must be a JSON Schema (an object)")
    inner.done()
    try:
        text = orjson.dumps(parameters or _NO_PARAMETERS).decode()
    except TypeError as error:
        raise inner.wrong("parameters", str(error)) from error
    return Tool(name, description, text)


def _choice(fields: Fields, value: Any, tools: Sequence[Tool]) -> Sequence[Tool] | None:
    """Tools that one of must be called; () where calling is free, None where forbidden."""
    if value is None or value == "auto":
        return ()
    if value == "none":
        return None
    if value == "required":
        if not tools:
            raise fields.wrong("tool_choice", "there are no tools")
        return tools
    if not isinstance(value, Mapping):
        reason = "must be none, auto, required, or an object that names a function"
        raise fields.wrong("tool_choice", reason)
    outer = Fields(value, fields.param("tool_choice"))
    if (kind := outer.required_string("type")) != "function":
        raise outer.wrong("type", f"{kind!r} is not supported; function")
    inner = Fields(outer.take("function") or {}, outer.param("function"))
    name = inner.required_string("name")
    inner.done()
    outer.done()
    named = [tool for tool in tools if tool.name == name]
    if not named:
        raise invalid(f"{inner.param('name')}: there is no tool {name!r}", inner.param("name"))
    return named


def call_grammar(tools: Sequence[Tool], several: bool) -> str:
    """Lark: one call of one of these tools, or several calls one after the other."""
    names = " | ".join(f"tool_{at}" for at in range(len(tools)))
    lines = [
        'start: call ("\\n" call)*' if several else "start: call",
        f"call: {quoted(OPEN + chr(10))} ({names}) {quoted(chr(10) + CLOSE)}",
    ]
    for at, tool in enumerate(tools):
        lines.append(f"tool_{at}: %json {orjson.dumps(_call_schema(tool)).decode()}")
    return "\n".join(lines)


def _call_schema(tool: Tool) -> dict[str, Any]:
    parameters = dict(orjson.loads(tool.parameters))
    # References start at the root, which is not the parameters' own any more.
    hoisted = {key: parameters.pop(key) for key in ("$defs", "definitions") if key in parameters}
    parameters.pop("$schema", None)
    return {
        "x-guidance": _FORMAT,
        "type": "object",
        "properties": {"name": {"const": tool.name}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
        **hoisted,
    }
