"""POST /v1/responses, stateless: one answer, nothing kept. What needs state is refused.
Its answer: `gateway.response_encoder`.

The body is translated to that of a chat and takes the same checks; names of fields in
errors are translated back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from epd.config import LimitsConfig
from epd.errors import too_many
from gateway.fields import Fields, as_json
from gateway.naming import Names
from gateway.schema import ChatCall, load_json, parse_chat

_NOT_SERVED: dict[str, Sequence[Any]] = {
    "store": (False,),
    "background": (False,),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    # Models here don't reason: there is nothing to be included.
    "include": ([], ["reasoning.encrypted_content"]),
    "reasoning": ({}, {"effort": "none"}),
    "truncation": ("disabled",),
    "max_tool_calls": (),
    "top_logprobs": (0,),
    "service_tier": ("auto", "default"),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "stream_options": ({}, {"include_obfuscation": False}),
    "context_management": ([],),
}
_SAME = (
    *("model", "stream", "user", "metadata", "safety_identifier", "prompt_cache_key"),
    "parallel_tool_calls",
    *("temperature", "top_p", "seed", "stop", "top_k", "min_p", "repetition_penalty"),
)
"""Fields that have the same name and meaning in a chat."""
_NAMES = (
    (r"max_(completion_)?tokens", "max_output_tokens"),
    (r"response_format(\.json_schema)?", "text.format"),
    (r"(tools\[\d+\]|tool_choice)\.function", r"\1"),
    (r"messages\[-1\].*", "instructions"),
    (r"(messages\[\d+\]\.content\[\d+\])\.image_url\.url", r"\1.image_url"),
    (r"(messages\[\d+\]\.content\[\d+\])\.image_url\.detail", r"\1.detail"),
    (r"(messages\[\d+\])\.(tool_calls\[0\]\.id|tool_call_id)", r"\1.call_id"),
    (r"(messages\[\d+\])\.tool_calls(\[0\])?(\.function)?", r"\1"),
)
"""What those of a chat are called here; the items of `input`: `_names`."""
_TOOL: dict[str, Any] = {"description": None, "parameters": None, "strict": False}
"""What a tool is where the client left it open."""
_MOST_METADATA = 64 << 10
"""As JSON; three events of a stream repeat it."""
_PARTS = {"input_text": "text", "output_text": "text", "text": "text"}


def parse_response(body: bytes, limits: LimitsConfig, vocab_size: int) -> ChatCall:
    """Check a JSON body.

    Raises:
        EpdError: INVALID_REQUEST naming the field as the client wrote it.
    """
    fields = Fields(load_json(body), "")
    chat: dict[str, Any] = {name: fields.take(name) for name in _SAME}
    chat["max_completion_tokens"] = fields.take("max_output_tokens")
    form = _format(fields)
    chat["response_format"] = _chat_format(form)
    tools, choice = fields.array("tools") or (), fields.take("tool_choice")
    if len(tools) > limits.max_tools:
        raise too_many("tools", len(tools), limits.max_tools, "tools")
    chat["tools"] = [_tool(tool) for tool in tools] or None
    chat["tool_choice"] = _tool_choice(choice)
    instructions, metadata = fields.string("instructions"), chat["metadata"]
    if not isinstance(metadata, Mapping | None):
        raise fields.wrong("metadata", "must be an object")
    if (size := len(as_json(metadata or {}, "metadata"))) > _MOST_METADATA:
        raise too_many("metadata", size, _MOST_METADATA, "bytes")
    first = [{"role": "system", "content": instructions}] if instructions else []
    said = fields.take("input")
    messages = _messages(fields, said, limits)
    chat["messages"] = [*first, *messages]
    fields.refuse(_NOT_SERVED)
    fields.done()
    names = _names(None if isinstance(said, str) else messages, len(first))
    with names.used():
        call = parse_chat(chat, limits, vocab_size)
    repeated = {
        "instructions": instructions,
        "metadata": metadata or {},
        "parallel_tool_calls": chat["parallel_tool_calls"] is not False,
        "text": {"format": form or {"type": "text"}},
        "tool_choice": choice or "auto",
        "tools": [_TOOL | {k: v for k, v in tool.items() if v is not None} for tool in tools],
    }
    for name, value in repeated.items():
        as_json([[[value]]], name)  # as deep as events have it
    return replace(call, repeated=repeated, names=names)


def _names(items: Sequence[Any] | None, before: int) -> Names:
    """The client's, where messages were made of these items, or of a text, behind `before`
    others."""
    if items is None:
        return Names((*_NAMES, (r"messages(\[\d+\].*)?", "input")), before)
    results = "|".join(str(at) for at, item in enumerate(items) if item["role"] == "tool")
    output = (rf"(messages\[(?:{results})\])\.content", r"\1.output")
    more = (output,) if results else ()
    return Names((*_NAMES, *more, (r"messages", "input")), before)


def _format(fields: Fields) -> Any:
    value = fields.take("text")
    if value is None:
        return None
    inner = Fields(value, "text")
    found = inner.take("format")
    inner.refuse({"verbosity": ("medium",)})
    inner.done()
    return found


def _chat_format(found: Any) -> Any:
    if isinstance(found, Mapping) and found.get("type") == "json_schema":
        schema = {key: item for key, item in found.items() if key != "type"}
        return {"type": "json_schema", "json_schema": schema}
    return found


def _tool(value: Any) -> Any:
    if not isinstance(value, Mapping) or value.get("type") != "function":
        return value
    function = {key: item for key, item in value.items() if key != "type"}
    return {"type": "function", "function": function}


def _tool_choice(value: Any) -> Any:
    return _tool(value) if isinstance(value, Mapping) else value


def _messages(fields: Fields, value: Any, limits: LimitsConfig) -> list[Any]:
    if value is None:
        raise fields.wrong("input", "is missing")
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise fields.wrong("input", "must be a text or an array of items")
    if len(value) > limits.max_messages:
        raise too_many("input", len(value), limits.max_messages, "items")
    contents = [item.get("content") for item in value if isinstance(item, Mapping)]
    parts = sum(len(content) for content in contents if isinstance(content, list))
    if parts > limits.max_parts:
        raise too_many("input", parts, limits.max_parts, "parts of all items")
    return [_item(item, f"input[{at}]") for at, item in enumerate(value)]


def _item(value: Any, path: str) -> dict[str, Any]:
    item = Fields(value, path)
    kind = item.string("type") or "message"
    for ignored in ("id", "status"):  # what an earlier answer said of itself
        item.string(ignored)
    if kind == "function_call":
        function = {"name": item.take("name"), "arguments": item.take("arguments")}
        call = {"id": item.take("call_id"), "type": "function", "function": function}
        message: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
    elif kind == "function_call_output":
        call_id, output = item.take("call_id"), _content(item.take("output"))
        message = {"role": "tool", "tool_call_id": call_id, "content": output}
    elif kind == "message":
        message = {"role": item.take("role"), "content": _content(item.take("content"))}
    else:
        raise item.wrong("type", f"{kind!r} is not supported")
    item.done()
    return message


def _content(value: Any) -> Any:
    return [_part(part) for part in value] if isinstance(value, list) else value


def _part(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    kind = value.get("type")
    if isinstance(kind, str) and kind in _PARTS:
        dropped = ("annotations", "logprobs")  # of an earlier answer; they are no input
        return {k: v for k, v in value.items() if k not in dropped} | {"type": _PARTS[kind]}
    if kind == "input_image" and value.get("file_id") is None:
        named = ("type", "image_url", "file_id")
        more = {key: item for key, item in value.items() if key not in named}
        return {"type": "image_url", "image_url": {"url": value.get("image_url"), **more}}
    return value
