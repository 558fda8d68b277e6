"""langchain-openai: image messages, streaming, structured output, tool calls."""

from __future__ import annotations

from typing import Any, Literal

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from epd.jobs import Stage
from tests.e2e.gateway_house import House, picture
from tests.e2e.test_gateway_tools import CALL, say


class Found(BaseModel):
    """What is in the picture."""

    colour: Literal["red", "blue"]


@tool
def weather(city: str) -> str:
    """Tells the weather."""
    return f"rain in {city}"


def chat(house: House) -> ChatOpenAI:
    key: Any = "x"
    return ChatOpenAI(base_url=f"http://{house.http}/v1", api_key=key, model="demo", max_retries=0)


async def test_an_image_streamed_and_whole(house: House) -> None:
    message = HumanMessage([{"type": "text", "text": "What?"}, picture()])
    whole = await chat(house).ainvoke([message])
    streamed = "".join([str(chunk.content) async for chunk in chat(house).astream([message])])
    assert streamed == whole.content
    assert len(house.script.jobs_of(Stage.PREFILL)[0].items) == 1
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == len(house.script.output)


async def test_structured_output(house: House) -> None:
    say(house, '{"colour": "blue"}')
    model = chat(house).with_structured_output(Found, method="json_schema")
    assert await model.ainvoke("What?") == Found(colour="blue")


async def test_tool_calls(tools: House) -> None:
    say(tools, CALL)
    answer = await chat(tools).bind_tools([weather]).ainvoke("Weather in Bern?")
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Bern"})
    result = await weather.ainvoke(call)
    say(tools, "Take a coat.")
    history = [HumanMessage("Weather in Bern?"), answer, result]
    assert (await chat(tools).bind_tools([weather]).ainvoke(history)).content == "Take a coat."


async def test_structured_output_by_a_forced_call(tools: House) -> None:
    say(tools, '<tool_call>\n{"name": "Found", "arguments": {"colour": "red"}}\n</tool_call>')
    model = chat(tools).with_structured_output(Found, method="function_calling")
    assert await model.ainvoke("What?") == Found(colour="red")
