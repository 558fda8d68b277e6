"""The official client's Responses API, stateless."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import openai
import pytest

from epd.errors import ErrorKind
from epd.jobs import Stage
from gateway.answer import Part
from gateway.response_encoder import ResponseEncoder
from protos.epd.v1 import common_pb2
from tests.e2e.fake_stages import fail
from tests.e2e.gateway_house import House, picture
from tests.e2e.http_client import post
from tests.e2e.test_gateway_tools import CALL, WEATHER, say

TOOL: Any = {"type": "function", "strict": False, **WEATHER["function"]}

UNSAID: dict[str, Any] = {
    "instructions": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
}


def connect(house: House) -> openai.AsyncOpenAI:
    url = f"http://{house.http}/v1"
    return openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0, timeout=60)


async def test_whole_and_streamed(house: House) -> None:
    image = {"type": "input_image", "detail": "auto", "image_url": picture()["image_url"]["url"]}
    text = {"type": "input_text", "text": "What?"}
    ask: dict[str, Any] = {
        "model": "demo",
        "instructions": "short",
        "input": [{"role": "user", "content": [image, text]}],
    }
    async with connect(house) as client:
        whole = await client.responses.create(**ask)
        async with client.responses.stream(**ask) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
    expected = house.gateway.service.tokenizer.decode(house.script.output)
    assert whole.output_text == final.output_text == expected
    assert (whole.status, whole.store) == ("completed", False)
    assert whole.usage is not None
    images = sum(item.rows for item in house.script.jobs_of(Stage.PREFILL)[0].items)
    details = whole.usage.input_tokens_details.model_dump()
    assert images
    assert details["image_tokens"] == images
    assert details["text_tokens"] == whole.usage.input_tokens - images
    assert whole.usage.output_tokens == len(house.script.output)
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert len(house.script.jobs_of(Stage.PREFILL)[0].items) == 1


async def test_tools_and_results(tools: House) -> None:
    say(tools, f"Look.\n{CALL}")
    async with connect(tools) as client:
        ask: dict[str, Any] = {"model": "demo", "input": "Weather?", "tools": [TOOL]}
        first = await client.responses.create(**ask)
        message, call = first.output
        assert (message.type, call.type) == ("message", "function_call")
        assert json.loads(call.arguments) == {"city": "Bern"}
        async with client.responses.stream(**ask) as stream:
            async for _ in stream:
                pass
            streamed = await stream.get_final_response()
        assert [item.type for item in streamed.output] == ["message", "function_call"]
        say(tools, "Coat.")
        history = [
            {"role": "user", "content": "Weather?"},
            *(item.model_dump(exclude_none=True) for item in first.output),
            {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
        ]
        second = await client.responses.create(model="demo", input=history, tools=[TOOL])
    assert second.output_text == "Coat."


async def test_hints_that_agents_send_change_nothing(tools: House) -> None:
    say(tools, "Rain.")
    ask: dict[str, Any] = {
        "model": "demo",
        "instructions": "short",
        "input": [{"type": "message", "role": "user", "content": "Weather?"}],
        "tools": [TOOL],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "store": False,
    }
    hints: dict[str, Any] = {
        "reasoning": {"effort": "none"},
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "conversation 5",
        "prompt_cache_retention": "in_memory",
        "safety_identifier": "someone",
    }
    async with connect(tools) as client:
        for more in ({}, hints):
            answer = await client.responses.create(**ask, **more)
            assert answer.output_text == "Rain."
    one, other = tools.script.jobs_of(Stage.PREFILL)
    assert one.token_ids == other.token_ids


async def test_half_a_call_does_not_look_like_one_to_make(tools: House) -> None:
    say(tools, CALL.partition("rn")[0])
    tools.script.finish = common_pb2.FINISH_REASON_LENGTH
    ask: dict[str, Any] = {"model": "demo", "input": "Weather?", "tools": [TOOL]}
    async with connect(tools) as client:
        cut = await client.responses.create(**ask)
        events = [event async for event in await client.responses.create(**ask, stream=True)]
    (call,) = cut.output
    assert (call.type, call.status) == ("function_call", "incomplete")
    with pytest.raises(json.JSONDecodeError):
        json.loads(call.arguments)
    (done,) = [event.item for event in events if event.type == "response.output_item.done"]
    assert done.status == "incomplete"
    assert events[-1].type == "response.incomplete"


async def test_length_and_a_fault_in_the_stream(house: House) -> None:
    async with connect(house) as client:
        cut = await client.responses.create(model="demo", input="a", max_output_tokens=1)
        assert cut.status == "incomplete"
        (message,) = cut.output
        assert message.type == "message"
        assert message.status == "incomplete"

        async def breaks(call: Any) -> None:
            if call.token == 3:
                await fail(ErrorKind.INTERNAL)(call)

        house.script.hooks["decode.token"] = breaks
        stream = await client.responses.create(model="demo", input="a", stream=True)
        kinds = [event.type async for event in stream]
    assert kinds[-1] == "response.failed"


async def test_the_answer_repeats_what_was_asked(tools: House) -> None:
    say(tools, "Rain.")
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    form = {"type": "json_schema", "name": "found", "schema": schema, "strict": True}
    asks: list[dict[str, Any]] = [
        {
            "instructions": "short",
            "metadata": {"of": "a test"},
            "tools": [TOOL],
            "tool_choice": {"type": "function", "name": "weather"},
            "parallel_tool_calls": False,
        },
        {"text": {"format": form}, "tool_choice": "none"},
        {"tools": [{"type": "function", "name": "bare"}]},
    ]
    for ask in asks:
        said: dict[str, Any] = {"model": "demo", "input": "a", **ask}
        reply = await post(tools.http, "/v1/responses", said)
        answer, open_fields = reply.json(), {"description": None, "parameters": None}
        shown = [{**open_fields, "strict": False, **tool} for tool in ask.get("tools", [])]
        expected = {**UNSAID, **ask, "tools": shown}
        assert {name: answer[name] for name in UNSAID} == expected
        async with (
            connect(tools) as client,
            client.responses.stream(**said) as found,
        ):
            events = [event async for event in found]
    created = events[0]
    assert created.type == "response.created"
    assert created.response.tools[0].to_dict() == shown[0]


async def test_a_fault_of_our_own_ends_the_stream(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, part = itertools.count(), ResponseEncoder.part

    def breaks(encoder: ResponseEncoder, said: Part) -> bytes:
        if next(made) == 2:
            raise ZeroDivisionError("secret")
        return part(encoder, said)

    async def slow(call: Any) -> None:
        await asyncio.sleep(0.01)

    monkeypatch.setattr(ResponseEncoder, "part", breaks)
    house.script.hooks["decode.token"] = slow
    async with connect(house) as client:
        stream = await client.responses.create(model="demo", input="a", stream=True)
        events = [event async for event in stream]
    assert events[-1].type == "response.failed"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"metadata": "x"}, "metadata"),
        ({"include": ["x"]}, "include"),
        ({"n": 2}, "n"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
        (
            {"instructions": "x", "input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            "input[0].content[0].type",
        ),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ],
)
async def test_what_is_refused_is_named(house: House, fields: dict[str, Any], param: str) -> None:
    reply = await post(house.http, "/v1/responses", {"model": "demo", "input": "a", **fields})
    assert (reply.status, reply.json()["error"]["param"]) == (400, param)
