"""Bodies that another process reads: which these are, and that they mean the same there."""

from __future__ import annotations

import base64
import json
from typing import Any

import orjson
import pytest

from epd.client import user
from epd.config import LimitsConfig
from epd.errors import EpdError, ErrorKind
from gateway.bodies import LIGHT_BYTES, LIGHT_VALUES, is_light
from gateway.body_process import Room, check_room, load, unpacked
from gateway.forms import Form, parse
from gateway.schema import ChatCall, count_values
from protos.epd.v1 import gateway_pb2 as pb

LIMITS, VOCAB = LimitsConfig(), 1000
ROOM = Room(context=2000, longest_token=10)
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object"}, "strict": True},
}


def apart(form: Form, body: bytes, room: Room = ROOM) -> ChatCall:
    """As the process does it, with the head through JSON and the rest through memory."""
    work = load(LIMITS.model_dump(), VOCAB)
    head, buffers = work({"form": str(form), "room": orjson.loads(orjson.dumps(room))}, body)
    return unpacked(json.loads(json.dumps(head)), memoryview(b"".join(buffers)))


def chat(**fields: Any) -> bytes:
    messages = [{"role": "user", "content": "Hello"}]
    return orjson.dumps({"model": "demo", "messages": messages, **fields})


CALLED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Grüße \u2028 \x00"}]},
    {
        "role": "assistant",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":[1e300]}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "5"},
]
DEEP: Any = {"a": 1}
for _ in range(120):
    DEEP = {"a": [DEEP]} if _ % 2 else {"b": DEEP, "c": None, "d": 1.5}
MESSAGE = pb.ChatRequest(
    model="m",
    messages=[user("Hello", "there")],
    options=pb.GenerationOptions(temperature=0.3, logit_bias={5: 0.5}, seed=3, json_object=True),
)
BODIES: list[tuple[Form, bytes]] = [
    (Form.CHAT, chat()),
    (Form.CHAT, chat(messages=CALLED, tools=[TOOL], tool_choice="required", n=3, stream=True)),
    (Form.CHAT, chat(logit_bias={"5": 0.1, "7": -100}, stop=["a", "b"], stop_token_ids=[1, 2])),
    (Form.CHAT, chat(temperature=1 / 3, top_p=0.1, seed=-(1 << 63), logprobs=True, top_logprobs=2)),
    (Form.CHAT, chat(seed=(1 << 64) - 1, max_tokens=1 << 30, guided_regex="[a-z]+", min_p=1e-300)),
    (Form.CHAT, chat(stream=True, stream_options={"include_usage": True}, timeline=True)),
    (
        Form.CHAT,
        chat(
            messages=CALLED,
            tools=[{"type": "function", "function": {"name": "g", "strict": True}}],
            response_format={"type": "json_object"},
        ),
    ),
    (Form.COMPLETION, orjson.dumps({"model": "m", "prompt": [1, 2, 3], "logprobs": 3})),
    (Form.COMPLETION, orjson.dumps({"model": "m", "prompt": "1"})),
    (Form.TOKENIZE, orjson.dumps({"messages": CALLED, "tools": [TOOL]})),
    (Form.DETOKENIZE, orjson.dumps({"tokens": [0, 999]})),
    (Form.GRPC_CHAT, MESSAGE.SerializeToString()),
    (Form.GRPC_COMPLETE, pb.CompletionRequest(ids=pb.TokenIds(ids=[1, 2])).SerializeToString()),
    (Form.GRPC_TOKENIZE, pb.TokenizeRequest(text="a").SerializeToString()),
    (Form.GRPC_DETOKENIZE, pb.DetokenizeRequest(ids=[1]).SerializeToString()),
    (
        Form.RESPONSE,
        orjson.dumps(
            {
                "model": "m",
                "input": "a",
                "instructions": "b",
                "metadata": {"x": "y"},
                "tools": [{"type": "function", "name": "f", "parameters": DEEP, "strict": False}],
            }
        ),
    ),
]


@pytest.mark.parametrize(("form", "body"), BODIES)
def test_a_body_means_the_same_wherever_it_is_read(form: Form, body: bytes) -> None:
    here = parse(form, body, LIMITS, VOCAB)
    assert apart(form, body) == here
    assert repr(apart(form, body)) == repr(here)  # types too: 1 == 1.0 == True


@pytest.mark.parametrize("body", [b"{", b"[]", chat(top_k="x"), chat(nothing=1), chat(messages=[])])
def test_what_is_wrong_is_told_as_it_is_here(body: bytes) -> None:
    with pytest.raises(EpdError) as here:
        parse(Form.CHAT, body, LIMITS, VOCAB)
    with pytest.raises(EpdError) as there:
        apart(Form.CHAT, body)
    assert there.value.openai_body() == here.value.openai_body()


def test_pictures_come_as_files_and_web_addresses_as_they_are() -> None:
    files = [b"\x89PNG" + bytes(range(256)) * 8000, b"GIF89a"]
    urls = ["data:image/png;base64," + base64.b64encode(file).decode() for file in files]
    parts = [
        {"type": "image_url", "image_url": {"url": urls[0], "detail": "low"}},
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
        {"type": "image", "image": urls[1].partition(",")[2]},
        {"type": "text", "text": "What?"},
    ]
    found = apart(Form.CHAT, chat(messages=[{"role": "user", "content": parts}]))
    first, second, third = found.conversation.images
    assert (first.value, second.value, third.value) == (
        files[0],
        "https://example.com/a.png",
        files[1],
    )
    assert [one.low_detail for one in (first, second, third)] == [True, False, False]
    assert first.param == "messages[0].content[0].image_url.url"


def test_a_damaged_picture_is_named() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:;base64,AAAA=AAA"}}
    with pytest.raises(EpdError) as caught:
        apart(Form.CHAT, chat(messages=[{"role": "user", "content": [part]}]))
    assert caught.value.kind is ErrorKind.INVALID_IMAGE
    assert caught.value.param == "messages[0].content[0].image_url.url"


def test_what_can_not_fit_is_not_copied_to_and_fro() -> None:
    long = ROOM.context * ROOM.longest_token + 1
    fits = chat(messages=[{"role": "user", "content": "a" * (long - 1)}])
    check_room(Form.CHAT, apart(Form.CHAT, fits), ROOM)
    for form, body, param in (
        (Form.CHAT, chat(messages=[{"role": "user", "content": "a" * long}]), "messages"),
        (Form.COMPLETION, orjson.dumps({"model": "m", "prompt": "a" * long}), "prompt"),
        (Form.COMPLETION, orjson.dumps({"model": "m", "prompt": [1] * 2001}), "prompt"),
        (Form.TOKENIZE, orjson.dumps({"prompt": "a" * long}), "prompt"),
    ):
        with pytest.raises(EpdError) as caught:
            apart(form, body)
        assert caught.value.kind is ErrorKind.CONTEXT_LENGTH_EXCEEDED
        assert caught.value.param == param
    with pytest.raises(EpdError, match="2001 ids, the context holds 2000"):
        apart(Form.DETOKENIZE, orjson.dumps({"tokens": [1] * 2001}))


def test_which_bodies_are_read_at_once() -> None:
    assert is_light([])
    assert is_light([b"x" * LIGHT_BYTES])
    assert not is_light([b"x" * LIGHT_BYTES, b"y"])
    for one in (b",", b"[", b"{"):
        assert is_light([one * LIGHT_VALUES])
        assert not is_light([one * (LIGHT_VALUES - 1), one * 2])


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (b"5", 1),
        (b"[]", 1),
        (b"[[[[]]]]", 4),
        (b'{"a":{"b":{}}}', 3),
        (b'[1,2,{"a":[],"b":3}]', 6),
    ],
)
def test_no_value_is_left_uncounted(text: bytes, values: int) -> None:
    assert count_values(text) + 1 >= values
