"""Tools over gRPC: the twins of `test_gateway_tools.py`."""

from __future__ import annotations

from typing import Any

import pytest

from epd.client import AsyncClient, assistant, tool, tool_result, user
from protos.epd.v1 import gateway_pb2 as pb
from tests.e2e.gateway_house import House
from tests.e2e.test_gateway_grpc import bad_field, jobs
from tests.e2e.test_gateway_tools import (  # noqa: F401 (fixtures)
    CALL,
    WEATHER,
    called,
    result,
    say,
    tool_model,
    tools,
)


def shown(strict: bool = False) -> pb.Tool:
    function: Any = WEATHER["function"]
    return tool(function["name"], function["description"], function["parameters"], strict=strict)


@pytest.mark.parametrize(
    ("choice", "over_grpc"),
    [
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "function": {"name": "weather"}}, "weather"),
    ],
)
@pytest.mark.parametrize("parallel", [None, False])
@pytest.mark.parametrize("strict", [True, False])
async def test_tools_are_the_same(
    tools: House,  # noqa: F811
    choice: Any,
    over_grpc: str,
    parallel: bool | None,
    strict: bool,
) -> None:
    say(tools, f"I will look.\n{CALL}\n{CALL}")
    weather = {**WEATHER, "function": {**WEATHER["function"], "strict": strict}}
    fields = {} if parallel is None else {"parallel_tool_calls": parallel}
    whole = (await tools.chat(tools=[weather], tool_choice=choice, **fields)).json()["choices"][0]
    over_http = jobs(tools)
    async with AsyncClient(tools.grpc) as client:
        answer = await client.chat(
            [user("what is it?")],
            tools=[shown(strict)],
            tool_choice=over_grpc,
            parallel_tool_calls=parallel,
            max_tokens=64,
        )
    assert jobs(tools) == over_http
    assert answer.text == (whole["message"]["content"] or "")
    assert answer.called == [whole["finish_reason"] == "tool_calls"] == [choice != "none"]
    calls = [(call.name, call.arguments) for call in answer.calls[0]]
    expected = whole["message"].get("tool_calls", [])
    assert calls == [(c["function"]["name"], c["function"]["arguments"]) for c in expected]


async def test_results_of_tools_are_the_same(tools: House) -> None:  # noqa: F811
    say(tools, "Rain.")
    history = [called("a1", '{"city": "Bern"}'), result("a1", "wet")]
    messages = [{"role": "user", "content": "Weather?"}, *history]
    assert (await tools.chat(messages=messages, tools=[WEATHER])).status == 200
    over_http = jobs(tools)
    call = pb.ToolCall(id="a1", name="weather", arguments='{"city": "Bern"}')
    said = [user("Weather?"), assistant("", [call]), tool_result("a1", "wet")]
    async with AsyncClient(tools.grpc) as client:
        await client.chat(said, tools=[shown()], max_tokens=64)
    assert jobs(tools) == over_http


async def test_a_form_beside_tools_is_the_same(tools: House) -> None:  # noqa: F811
    say(tools, CALL)
    fields = {"tools": [WEATHER], "response_format": {"type": "json_object"}}
    assert (await tools.chat(**fields)).status == 200
    over_http = jobs(tools)
    async with AsyncClient(tools.grpc) as client:
        ask = client.chat([user("what is it?")], tools=[shown()], json_object=True, max_tokens=64)
        assert (await ask).called == [True]
    assert jobs(tools) == over_http
    request = pb.ChatRequest(messages=[user("a")], tools=[shown()])
    request.options.guided_json = "{}"
    assert await bad_field(tools, request) == "options.guided_json"


NAMELESS = pb.ToolCall(id="a", arguments="{}")
UNKNOWN_MODE = pb.ToolChoice(mode=9)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [tool("a b")]}, "tools[0].name"),
        ({"tools": [tool("a"), tool("a")]}, "tools[1].name"),
        ({"tools": [pb.Tool(name="a", parameters="{")]}, "tools[0].parameters"),
        ({"tools": [pb.Tool(name="a", parameters="[]")]}, "tools[0].parameters"),
        ({"tool_choice": pb.ToolChoice(function="b")}, "tool_choice.function"),
        ({"tool_choice": UNKNOWN_MODE}, "tool_choice.mode"),
        ({"messages": [assistant("", [NAMELESS])]}, "messages[1].tool_calls[0].name"),
        ({"messages": [tool_result("zz", "x")]}, "messages[1].tool_call_id"),
        ({"messages": [tool_result("", "x")]}, "messages[1].tool_call_id"),
        (
            {"messages": [pb.Message(role=pb.ROLE_USER, tool_call_id="a")]},
            "messages[1].tool_call_id",
        ),
        (
            {"messages": [pb.Message(role=pb.ROLE_USER, tool_calls=[NAMELESS])]},
            "messages[1].tool_calls",
        ),
    ],
)
async def test_bad_tools_are_named(
    tools: House,  # noqa: F811
    change: dict[str, Any],
    param: str,
) -> None:
    request = pb.ChatRequest(messages=[user("a"), *change.pop("messages", [])])
    request.tools.extend(change.pop("tools", [shown()]))
    if choice := change.pop("tool_choice", None):
        request.tool_choice.CopyFrom(choice)
    assert await bad_field(tools, request) == param
