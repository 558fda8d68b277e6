"""Every form of request, with each of its values replaced by every kind of value: it is read, or
refused as the client's fault. Whatever else is raised would be an internal error."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import orjson
import pytest

from epd.config import LimitsConfig
from epd.errors import EpdError
from gateway.forms import Form, parse

LIMITS, VOCAB = LimitsConfig(), 1024
URL = "data:image/png;base64,AAAA"
FUNCTION = {
    "name": "f",
    "description": "d",
    "strict": True,
    "parameters": {"type": "object", "$defs": {"a": {}}, "properties": {"a": {"$ref": "#"}}},
}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}"}}
SCHEMA = {"name": "x", "description": "d", "strict": True, "schema": {"type": "object"}}
SAMPLING = {
    **{"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1},
    **{"presence_penalty": 0.1, "frequency_penalty": 0.1, "seed": 1, "stop": ["a"], "n": 2},
    **{"min_tokens": 1, "ignore_eos": False, "logit_bias": {"5": 1}, "stop_token_ids": [1]},
}
PARTS = [
    {"type": "text", "text": "a"},
    {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
    {"type": "image_url", "image_url": URL},
    {"type": "image", "image": "AAAA"},
]
MESSAGES = [
    {"role": "system", "name": "s", "content": "a"},
    {"role": "user", "name": "u", "content": PARTS},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "name": "f", "content": [{"type": "text", "text": "a"}]},
]
ITEMS = [
    {
        "type": "message",
        "role": "user",
        "content": [
            {"type": "input_text", "text": "a"},
            {"type": "input_image", "image_url": URL, "detail": "low", "file_id": None},
        ],
    },
    {
        "id": "m",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}],
    },
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "a"},
]
BODIES: list[tuple[Form, dict[str, Any]]] = [
    (
        Form.CHAT,
        {
            **{"model": "m", "messages": MESSAGES, "tools": [TOOL], "max_tokens": 3},
            **{"tool_choice": {"type": "function", "function": {"name": "f"}}, **SAMPLING},
            **{"parallel_tool_calls": False, "logprobs": True, "top_logprobs": 2, "user": "u"},
            **{"stream": True, "stream_options": {"include_usage": True}, "timeline": True},
            **{"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
            **{"metadata": {"a": "b"}, "store": False, "reasoning_effort": "none"},
        },
    ),
    (Form.CHAT, {"model": "m", "messages": MESSAGES[:2], "guided_json": {"type": "object"}}),
    (Form.CHAT, {"model": "m", "messages": MESSAGES[:2], "guided_choice": ["a", "b"]}),
    (Form.CHAT, {"model": "m", "messages": MESSAGES[:2], "guided_regex": "a+"}),
    (
        Form.COMPLETION,
        {"model": "m", "prompt": "a", "max_tokens": 3, "logprobs": 2, "stream": True, **SAMPLING},
    ),
    (Form.COMPLETION, {"model": "m", "prompt": [1, 2]}),
    (Form.COMPLETION, {"model": "m", "prompt": [[1, 2]]}),
    (
        Form.RESPONSE,
        {
            **{"model": "m", "input": ITEMS, "instructions": "i", "max_output_tokens": 3},
            **{"tools": [{"type": "function", **FUNCTION}], "metadata": {"a": "b"}},
            **{"tool_choice": {"type": "function", "name": "f"}, "reasoning": {"effort": "none"}},
            **{"text": {"format": {"type": "json_schema", **SCHEMA}, "verbosity": "medium"}},
            **{"include": [], "stream": True, "stream_options": {"include_obfuscation": False}},
            **{"temperature": 0.5, "top_p": 0.9, "parallel_tool_calls": False, "store": False},
        },
    ),
    (Form.RESPONSE, {"model": "m", "input": "a"}),
    (Form.TOKENIZE, {"model": "m", "prompt": "a"}),
    (Form.TOKENIZE, {"model": "m", "messages": MESSAGES, "tools": [TOOL]}),
    (Form.DETOKENIZE, {"model": "m", "tokens": [1, 2]}),
]
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1 << 63, 1.5, 1e308, "", "a", "\0", "\u2028", "<|im_end|>", URL),
    *([], [[]], [None], ["a"], [{}], [True]),
    *({}, {"": ""}, {"type": "text"}, {"type": {}}, {"a": [{"b": None}]}, {"function": []}),
]


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """Paths to all that is in a value."""
    if isinstance(value, dict):
        inside = list(value.items())
    else:
        inside = list(enumerate(value)) if isinstance(value, list) else []
    for key, item in inside:
        yield (key,)
        for path in places(item):
            yield (key, *path)


def changed(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each value replaced, taken away, and (of objects) joined by one that nobody knows."""
    for *way, last in places(body):
        for odd in ODD:
            made, found = _found(body, way)
            found[last] = odd
            yield made
        made, found = _found(body, way)
        del found[last]
        yield made
        if isinstance(found, dict):
            found["odd"] = {}
            yield made


def _found(body: dict[str, Any], way: Sequence[Any]) -> tuple[dict[str, Any], Any]:
    """A copy of the body, and what is at a place of it."""
    made = copy.deepcopy(body)
    found: Any = made
    for key in way:
        found = found[key]
    return made, found


def fault_of(form: Form, data: bytes) -> EpdError | None:
    """Of the client; None: it is read."""
    try:
        parse(form, data, LIMITS, VOCAB)
    except EpdError as error:
        return error
    except Exception as fault:
        raise AssertionError(data) from fault
    return None


@pytest.mark.parametrize(("form", "body"), BODIES)
def test_what_a_client_writes_is_read_or_its_fault(form: Form, body: dict[str, Any]) -> None:
    assert fault_of(form, orjson.dumps(body)) is None
    for odd in changed(body):
        data = orjson.dumps(odd)
        error = fault_of(form, data)
        assert error is None or (error.message and 400 <= error.mapping.http_status < 500), data
