"""Errors name fields as their client wrote them, in whichever form and however late."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
from PIL import Image

from epd.client import AsyncClient, image_url, user
from epd.errors import EpdError, ErrorKind
from gateway.naming import Names
from protos.epd.v1 import gateway_pb2 as pb
from tests.e2e.fake_stages import Call
from tests.e2e.gateway_house import House
from tests.e2e.http_client import Reply, post

MANY = 10**7
"""More tokens than any context holds."""
NO_PICTURE = "data:image/png;base64," + base64.b64encode(b"no picture").decode()
NO_GRAMMAR = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}


async def respond(house: House, **fields: Any) -> Reply:
    return await post(house.http, "/v1/responses", {"model": "demo", "input": "what?", **fields})


def asked(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "input_text", "text": "what?"}, *parts]}


def shown(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url, **more}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_output_tokens": MANY}, "max_output_tokens"),
        ({"input": "a " * 40_000}, "input"),
        ({"input": [asked(), asked(shown(NO_PICTURE))]}, "input[1].content[1].image_url"),
        (
            {"instructions": "short", "input": [asked(shown(NO_PICTURE))]},
            "input[0].content[1].image_url",
        ),
        ({"input": [asked(shown("x", detail="much"))]}, "input[0].content[1].detail"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": NO_GRAMMAR}}},
            "text.format.schema",
        ),
        (
            {"input": [asked(), {"type": "function_call", "name": "f", "arguments": "{}"}]},
            "input[1].call_id",
        ),
        (
            {"input": [asked(), {"type": "function_call", "call_id": "1", "name": 5}]},
            "input[1].name",
        ),
    ],
)
async def test_responses(house: House, fields: dict[str, Any], param: str, stream: bool) -> None:
    reply = await respond(house, stream=stream, **fields)
    assert (reply.status, reply.json()["error"]["param"]) == (400, param)
    inner = ("messages[", "image_url.url", "response_format", "max_tokens", "max_completion")
    assert not [name for name in inner if name in reply.json()["error"]["message"]]


async def test_a_large_body_is_refused_in_the_same_words(house: House) -> None:
    # By the process that reads what has many commas.
    reply = await respond(house, input=", " * 300_000)
    assert (reply.status, reply.json()["error"]["param"]) == (400, "input")


async def test_a_picture_that_only_the_encoder_finds_broken(house: House) -> None:
    async def broken(call: Call) -> None:
        param = "messages[1].content[1].image_url.url"
        raise EpdError(ErrorKind.INVALID_IMAGE, "it is broken", param=param)

    house.script.hooks["encode.job"] = broken
    fields = {"instructions": "short", "input": [asked(shown(_url()))]}
    reply = await respond(house, **fields)
    assert reply.json()["error"]["param"] == "input[0].content[1].image_url"


def _url() -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 48), "red").save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_the_limit_of_a_chat_by_the_name_that_was_sent(house: House, name: str) -> None:
    reply = await house.chat(**{"max_tokens": None, name: MANY})
    assert (reply.status, reply.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"max_tokens": MANY}, "options.max_tokens"),
        ({"guided_regex": "("}, "options.guided_regex"),
        ({"guided_regex": "a", "guided_json": "{}"}, "options.guided_regex"),
        ({"json_object": True, "guided_choice": ["a"]}, "options.guided_choice"),
        ({"stop_token_ids": [1] * 257}, "options.stop_token_ids"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "options.logit_bias"),
        ({"min_tokens": 2000}, "options.min_tokens"),
    ],
)
async def test_grpc_options(house: House, options: dict[str, Any], param: str) -> None:
    async with AsyncClient(house.grpc) as client:
        with pytest.raises(EpdError) as caught:
            await client.chat([user("what?")], **options)
    assert (caught.value.kind.value[:7], caught.value.param) in {
        ("invalid", param),
        ("context", param),
    }
    assert "response_format" not in caught.value.message


async def test_grpc_messages_and_prompts(house: House) -> None:
    message = user("what?")
    message.parts.append(image_url(NO_PICTURE))
    image = house.gateway.service.preparer._served.spec.image_token_id
    async with AsyncClient(house.grpc) as client:
        for call, param in (
            (client.chat([message]), "messages[0].parts[1].image_url"),
            (client.chat([user("a " * 40_000)]), "messages"),
            (client.complete("a " * 40_000), "text"),
            (client.complete([5, image]), "ids.ids"),
            (client.tokenize("a " * 40_000), "text"),
        ):
            with pytest.raises(EpdError) as caught:
                await call
            assert caught.value.param == param


async def test_a_stage_names_an_option(house: House) -> None:
    async def wrong(call: Call) -> None:
        raise EpdError(ErrorKind.INVALID_REQUEST, "temperature: is odd", param="temperature")

    house.script.hooks["prefill.job"] = wrong
    async with AsyncClient(house.grpc) as client:
        with pytest.raises(EpdError, match=r"^options\.temperature: is odd") as caught:
            await client.chat([user("what?")])
    assert caught.value.param == "options.temperature"


async def test_the_image_field_of_grpc_and_what_its_template_leaves_out(house: House) -> None:
    request = pb.ChatRequest(messages=[user("what?", b"no picture")])
    async with AsyncClient(house.grpc) as client:
        with pytest.raises(EpdError) as caught:
            await client.chat(list(request.messages))
    assert caught.value.param == "messages[0].parts[1].image"


def test_what_was_renamed_is_not_renamed_again() -> None:
    names = Names(((r"prompt\b", "text"), (r"messages", "input")), before=1)
    assert names.of("messages[3].content") == "input[2].content"
    for param in ("prompt", "messages", "messages[1].content[0]", "model"):
        assert names.of(names.of(param)) == names.of(param)
    error = EpdError(ErrorKind.OVERLOADED, "prompt: much", param="prompt", retry_after_s=2.0)
    told = names.renamed(error)
    assert (told.kind, told.message, told.retry_after_s) == (error.kind, "text: much", 2.0)
    assert names.renamed(told) is told
