"""Cases about tools, over scripted stages and a template that takes them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from epd.client import AsyncClient, assistant, tool_result, user
from epd.jobs import Stage
from gateway.checkpoint import load
from protos.epd.v1 import gateway_pb2 as pb
from tests.cases.pictures import data_url, file, part, quad, text
from tests.e2e.gateway_house import House, config, opened
from tests.e2e.http_client import post
from tests.e2e.test_gateway_tools import (  # noqa: F401 (fixtures)
    CALL,
    TEMPLATE,
    WEATHER,
    called,
    prompt,
    result,
    say,
    tool_model,
    tools,
    with_template,
)

ARGUMENTS = '{"city": "Bern"}'
PICTURE = file(quad())
HISTORY = [
    {"role": "user", "content": "Weather?"},
    called("a1", ARGUMENTS),
    result("a1", [text("Seen:"), part(data_url(PICTURE))]),
]


async def by_chat(house: House) -> None:
    usage = (await house.chat(messages=HISTORY)).json()["usage"]
    (item,) = house.script.jobs_of(Stage.PREFILL)[-1].items
    assert usage["prompt_tokens_details"]["image_tokens"] == item.rows


async def by_stream(house: House) -> None:
    assert (await house.stream(messages=HISTORY))[-1] == "[DONE]"


async def by_responses(house: House) -> None:
    shown = {"type": "input_image", "image_url": data_url(PICTURE)}
    output = [{"type": "input_text", "text": "Seen:"}, shown]
    items = [
        {"role": "user", "content": "Weather?"},
        {"type": "function_call", "call_id": "a1", "name": "weather", "arguments": ARGUMENTS},
        {"type": "function_call_output", "call_id": "a1", "output": output},
    ]
    reply = await post(house.http, "/v1/responses", {"model": "demo", "input": items})
    assert reply.status == 200, reply.body


async def by_grpc(house: House) -> None:
    call = pb.ToolCall(id="a1", name="weather", arguments=ARGUMENTS)
    said = [user("Weather?"), assistant("", [call]), tool_result("a1", "Seen:", PICTURE)]
    async with AsyncClient(house.grpc) as client:
        await client.chat(said, max_tokens=64)


@pytest.mark.parametrize("ask", [by_chat, by_stream, by_responses, by_grpc])
async def test_prm_08_an_image_in_a_tool_result_is_seen(
    tools: House,  # noqa: F811
    ask: Callable[[House], Awaitable[None]],
) -> None:
    """It stands in the prompt where its part does, and its file reaches encode."""
    await ask(tools)
    (job,) = tools.script.jobs_of(Stage.PREFILL)
    (item,) = job.items
    (encoded,) = tools.script.jobs_of(Stage.ENCODE)
    assert (encoded.image, encoded.item.digest) == (PICTURE, item.digest)
    run = f"<|vision_start|>{'<|image_pad|>' * item.rows}<|vision_end|>"
    assert f"<|im_start|>tool\nSeen:{run}<|im_end|>" in prompt(tools)


async def test_prm_08_a_template_that_hides_it_refuses_it_by_name(tmp_path: Path) -> None:
    picture = "c['type'] == 'image'"
    template = TEMPLATE.replace(picture, f"{picture} and m['role'] != 'tool'")
    folder = with_template(tmp_path, template)
    async with opened(load(config().model.model_copy(update={"path": str(folder)}))) as house:
        for stream in (False, True):
            reply = await house.chat(messages=HISTORY, stream=stream)
            assert reply.status == 400, reply.body
            error = reply.json()["error"]
            assert error["param"] == "messages[2].content[1]"
            assert "no image in a tool message" in error["message"]
        assert not house.script.jobs


STOPPED = {
    # In the arguments, which were sent as they came.
    "}": ("Look:", '{"city": "Bern"'),
    "Bern": ("Look:", '{"city": "'),
    "\n": ("Look:", ""),
    # Before it was known to be a call: what was held back is content.
    "weather": ('Look:\n<tool_call>\n{"name": "', ""),
    "call>": ("Look:\n<tool_", ""),
}


@pytest.mark.parametrize("stop", STOPPED)
async def test_str_14_a_stop_string_in_a_call_loses_nothing(
    tools: House,  # noqa: F811
    stop: str,
) -> None:
    say(tools, f"Look:\n{CALL}")
    whole = (await tools.chat(tools=[WEATHER], stop=stop)).json()["choices"][0]
    events = await tools.stream(tools=[WEATHER], stop=stop)
    content = arguments = ""
    for event in events[:-1]:
        delta = event["choices"][0]["delta"]
        content += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            arguments += call["function"]["arguments"]
    calls = whole["message"].get("tool_calls", [])
    assert content == (whole["message"]["content"] or "")
    assert arguments == "".join(call["function"]["arguments"] for call in calls)
    assert whole["finish_reason"] == events[-2]["choices"][0]["finish_reason"]
    assert whole["finish_reason"] == "stop", "the call is not whole"
    assert (content, arguments) == STOPPED[stop]


async def test_prm_04_text_in_arguments_that_speaks_of_images_is_text(
    tools: House,  # noqa: F811
) -> None:
    arguments = '{"city": "\\"type\\": \\"image_url\\" data:image/png;base64,AAAA"}'
    messages = [{"role": "user", "content": "a"}, called("a", arguments), result("a", "b")]
    usage = (await tools.chat(messages=messages)).json()["usage"]
    assert usage["prompt_tokens_details"]["image_tokens"] == 0
