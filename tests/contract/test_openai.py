"""The official OpenAI client: chat, images, tools, parse helper, error classes, retries."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel

from epd.errors import ErrorKind
from epd.jobs import Stage
from tests.e2e.fake_stages import fail
from tests.e2e.gateway_house import House, body
from tests.e2e.test_gateway_tools import CALL, WEATHER, say

ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What?"}]


def connect(house: House, retries: int = 0, key: str = "x") -> openai.AsyncOpenAI:
    url = f"http://{house.http}/v1"
    return openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=retries, timeout=60)


@pytest.fixture
async def client(house: House) -> AsyncIterator[openai.AsyncOpenAI]:
    async with connect(house) as found:
        yield found


class Found(BaseModel):
    colour: Literal["red", "blue"]
    sides: int


async def test_images_and_stream(house: House, client: openai.AsyncOpenAI) -> None:
    request: dict[str, Any] = body(images=2)
    whole = await client.chat.completions.create(**request)
    assert whole.usage is not None
    async with client.chat.completions.stream(**request) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert len(house.script.jobs_of(Stage.PREFILL)[0].items) == 2


async def test_the_parse_helper(house: House, client: openai.AsyncOpenAI) -> None:
    say(house, '{"colour": "red", "sides": 4}')
    found = await client.chat.completions.parse(model="demo", messages=ASK, response_format=Found)
    assert found.choices[0].message.parsed == Found(colour="red", sides=4)
    schema = house.script.jobs_of(Stage.DECODE)[-1].sampling.grammar.json_schema
    assert '"colour"' in schema


async def test_tools_and_their_results(tools: House) -> None:
    say(tools, CALL)
    async with connect(tools) as client:
        request: dict[str, Any] = {"model": "demo", "tools": [WEATHER], "messages": list(ASK)}
        first = (await client.chat.completions.create(**request)).choices[0]
        assert first.finish_reason == "tool_calls"
        assert first.message.tool_calls is not None
        result = {
            "role": "tool", "tool_call_id": first.message.tool_calls[0].id, "content": "rain",
        }  # fmt: skip
        # As people do: the client's own object goes back into the history.
        request["messages"] += [first.message.model_dump(exclude_none=True), result]
        say(tools, "Take a coat.")
        second = await client.chat.completions.create(**request)
    assert second.choices[0].message.content == "Take a coat."


async def test_error_classes(house: House, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="demo", messages=ASK, temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")
    house.script.hooks["prefill.job"] = fail(ErrorKind.OVERLOADED)
    with pytest.raises(openai.RateLimitError):
        await client.chat.completions.create(model="demo", messages=ASK)
    house.script.hooks["prefill.job"] = fail(ErrorKind.INTERNAL)
    with pytest.raises(openai.InternalServerError):
        await client.chat.completions.create(model="demo", messages=ASK)


async def test_its_retries_succeed(house: House) -> None:
    house.script.hooks["prefill.job"] = fail(ErrorKind.OVERLOADED, times=1)
    async with connect(house, retries=2) as client:
        answer = await client.chat.completions.create(model="demo", messages=ASK)
    assert answer.choices[0].finish_reason == "stop"


async def test_a_fault_in_the_stream_is_raised(house: House, client: openai.AsyncOpenAI) -> None:
    async def breaks(call: Any) -> None:
        if call.token == 3:
            await fail(ErrorKind.INTERNAL)(call)

    house.script.hooks["decode.token"] = breaks
    stream = await client.chat.completions.create(model="demo", messages=ASK, stream=True)
    with pytest.raises(openai.APIError):
        async for _ in stream:
            pass
