"""What the official client's types say of each answer, taken at their word: the client itself
builds objects of whatever comes, and a field that is missing is found by whoever reads it."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.e2e.gateway_house import CHAT, House, picture
from tests.e2e.http_client import get, post
from tests.e2e.test_gateway_tools import CALL, WEATHER, say

CHATS: list[dict[str, Any]] = [
    {},
    {"tools": [WEATHER]},
    {"n": 2, "logprobs": True, "top_logprobs": 2, "timeline": True},
    {"max_tokens": 1},
]
_FORM = {"type": "json_schema", "name": "found", "schema": {"type": "object"}, "strict": True}
RESPONSES: list[dict[str, Any]] = [
    {"instructions": "short", "metadata": {"of": "a test"}},
    {"tools": [{"type": "function", **WEATHER["function"]}], "tool_choice": "auto"},
    {"text": {"format": _FORM}},
    {"max_output_tokens": 1},
]


def data(body: bytes) -> list[bytes]:
    lines = (line for event in body.split(b"\n\n") for line in event.split(b"\n"))
    return [line[6:] for line in lines if line.startswith(b"data: ") and line != b"data: [DONE]"]


@pytest.fixture
def asked(tools: House) -> House:
    say(tools, f"Look.\n{CALL}")
    tools.script.alternatives = 2
    return tools


@pytest.mark.parametrize("fields", CHATS)
async def test_chats(asked: House, fields: dict[str, Any]) -> None:
    content = [picture(), {"type": "text", "text": "What?"}]
    ask = {"model": "demo", "messages": [{"role": "user", "content": content}], **fields}
    whole = await post(asked.http, CHAT, ask)
    ChatCompletion.model_validate_json(whole.body)
    for options in ({}, {"stream_options": {"include_usage": True}}):
        events = data((await post(asked.http, CHAT, {**ask, "stream": True, **options})).body)
        assert len(events) > 2
        for event in events:
            ChatCompletionChunk.model_validate_json(event)


@pytest.mark.parametrize("fields", RESPONSES)
async def test_responses(asked: House, fields: dict[str, Any]) -> None:
    ask = {"model": "demo", "input": "Weather?", **fields}
    whole = await post(asked.http, "/v1/responses", ask)
    Response.model_validate_json(whole.body)
    events = data((await post(asked.http, "/v1/responses", {**ask, "stream": True})).body)
    assert len(events) > 4
    kind: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for event in events:
        kind.validate_json(event)


async def test_completions_and_models(asked: House) -> None:
    for fields in ({}, {"logprobs": 2, "n": 2}):
        ask = {"model": "demo", "prompt": "One", "max_tokens": 5, **fields}
        whole = await post(asked.http, "/v1/completions", ask)
        Completion.model_validate_json(whole.body)
    for model in (await get(asked.http, "/v1/models")).json()["data"]:
        Model.model_validate(model)
    Model.model_validate_json((await get(asked.http, "/v1/models/demo")).body)
