"""`tools`, `tool_choice`, `parallel_tool_calls`: what the model may or must call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from epd.config import LimitsConfig
from epd.errors import invalid, too_many
from epd.jobs import Grammar, GrammarKind
from epd.text.messages import Tool
from gateway.constraints import Constraint, check_size, quoted
from gateway.fields import Fields, as_json
from gateway.toolcalls import CLOSE, OPEN

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FORMAT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
_HOISTED = ("$defs", "definitions")
_ANY_PARAMETERS = '{"type":"object"}'


@dataclass(frozen=True, slots=True)
class ToolUse:
    """`tools` are shown to the model."""

    tools: tuple[Tool, ...]
    constraint: Constraint | None
    """Forces a call, or holds free ones to the schemas of strict tools."""
    single: bool = False
    """The model is free to call, but once: the output ends with its first call."""
    strict: tuple[Tool, ...] = ()
    """Of `tools`: every call of these fits its schema."""
    forced: bool = False
    """The output is calls and nothing else."""


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
    read = [_tool(item, fields.param(f"tools[{i}]")) for i, item in enumerate(value)]
    size = sum(len(tool.description) + len(tool.parameters) for tool, _ in read)
    if size > (most := limits.max_tools_bytes):
        what = "bytes of descriptions and schemas"
        raise too_many(fields.param("tools"), size, most, what)
    tools, strict = [tool for tool, _ in read], [tool for tool, held in read if held]
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
        constraint = Constraint(_lark(call_grammar(wanted, several)), fields.param("tools"))
    elif strict:
        trial = _lark(call_grammar(strict, several=False))
        constraint = Constraint(_lark(free_grammar(tools, strict)), fields.param("tools"), trial)
    if constraint is not None:
        check_size(constraint, limits)
    return ToolUse(
        tuple(tools),
        constraint,
        single=not wanted and not parallel,
        strict=tuple(strict),
        forced=bool(wanted),
    )


def _tool(value: Any, path: str) -> tuple[Tool, bool]:
    """The tool, and whether each call of it must fit its schema."""
    outer = Fields(value, path)
    if (kind := outer.required_string("type")) != "function":
        raise outer.wrong("type", f"{kind!r} is not supported; function")
    inner = Fields(outer.take("function") or {}, outer.param("function"))
    outer.done()
    name = inner.required_string("name")
    if not _NAME.fullmatch(name):
        raise inner.wrong("name", "must be 1 to 64 of a-z, A-Z, 0-9, '_', '.' and '-'")
    description = inner.string("description") or ""
    strict = inner.boolean("strict")
    parameters = inner.take("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise inner.wrong("parameters", "must be a JSON Schema (an object)")
    inner.done()
    text = as_json(parameters or _NO_PARAMETERS, inner.param("parameters"))
    return Tool(name, description, text), strict


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
    start = 'start: call ("\\n" call)*' if several else "start: call"
    return "\n".join([start, f"call: {quoted(OPEN)} body", *_body(tools)])


def free_grammar(tools: Sequence[Tool], strict: Sequence[Tool]) -> str:
    """Lark: any text, in which what begins as a call is a call of one of these tools, with
    any arguments but where the tool is strict."""
    lines = [
        "start: call* TEXT",
        "call: begin body",
        f"begin[lazy]: TEXT {quoted(OPEN)}",
        r"TEXT: /(.|\n)*/",
    ]
    return "\n".join([*lines, *_body(_held(tools, strict))])


def _held(tools: Sequence[Tool], strict: Sequence[Tool]) -> list[Tool]:
    """As free calls must fit them."""
    return [tool if tool in strict else replace(tool, parameters=_ANY_PARAMETERS) for tool in tools]


def with_form(use: ToolUse, form: Constraint, limits: LimitsConfig) -> Constraint:
    """The output is calls, or else what `response_format` asks for; what must be called leaves
    no room for that.

    Raises:
        EpdError: INVALID_REQUEST, together they are too large to compile.
    """
    if use.forced:
        assert use.constraint is not None
        return use.constraint
    call = call_grammar(_held(use.tools, use.strict), several=not use.single)
    schema = {"x-guidance": _FORMAT, **orjson.loads(form.grammar.text)}
    lines = [
        "start: calls | form",
        call.replace("start:", "calls:", 1),
        f"form: %json {orjson.dumps(schema).decode()}",
    ]
    parts = replace(form, beside=use.constraint)
    made = Constraint(_lark("\n".join(lines)), form.param, beside=parts)
    check_size(made, limits)
    return made


def _body(tools: Sequence[Tool]) -> list[str]:
    """What a call has after its opening tag."""
    names = " | ".join(f"tool_{at}" for at in range(len(tools)))
    schemas = (orjson.dumps(_call_schema(tool)).decode() for tool in tools)
    return [
        f"body: {quoted(chr(10))} ({names}) {quoted(chr(10) + CLOSE)}",
        *(f"tool_{at}: %json {schema}" for at, schema in enumerate(schemas)),
    ]


def _lark(text: str) -> Grammar:
    return Grammar(GrammarKind.LARK, text)


def _call_schema(tool: Tool) -> dict[str, Any]:
    # References start at the root, which is not the parameters' own any more.
    parameters = _moved(orjson.loads(tool.parameters), "#/properties/arguments")
    hoisted = {key: parameters.pop(key) for key in _HOISTED if key in parameters}
    parameters.pop("$schema", None)
    return {
        "x-guidance": _FORMAT,
        "type": "object",
        "properties": {"name": {"const": tool.name}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
        **hoisted,
    }


def _moved(schema: Any, place: str) -> Any:
    """The schema with references to its own root ("#", "#/properties/a") led to `place`, where
    that will be; those to definitions stay, which stand at the root again."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _moved(item, place) for key, item in schema.items()}
    target = found.get("$ref")
    at_root = tuple(f"#/{key}/" for key in _HOISTED)
    if isinstance(target, str) and (target == "#" or target.startswith("#/")):
        found["$ref"] = target if target.startswith(at_root) else place + target[1:]
    return found
