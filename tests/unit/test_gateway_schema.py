"""The chat body: every field is served, refused by name, or unknown; none is ignored."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from epd.config import LimitsConfig
from epd.errors import EpdError
from epd.text.messages import ImagePart, TextPart
from gateway.schema import NOT_SERVED, ChatCall, parse_body

VOCAB = 1000
LIMITS = LimitsConfig(max_images=3, max_stop_strings=4, max_stop_length=8, max_messages=5)
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def parse(**fields: Any) -> ChatCall:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return parse_body(json.dumps(body).encode(), LIMITS, VOCAB)


def refused(**fields: Any) -> EpdError:
    with pytest.raises(EpdError) as caught:
        parse(**fields)
    assert caught.value.mapping.http_status == 400
    return caught.value


def test_defaults_are_those_of_openai() -> None:
    call = parse()
    sampling = call.generation.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert call.generation.max_tokens is None
    assert call.generation.seed is None
    assert (call.stream, call.include_usage, call.timeline) == (False, False, False)


OPTIONAL: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "seed": 1,
    "logit_bias": {"1": 2},
    "max_tokens": 5,
    "max_completion_tokens": 5,
    "min_tokens": 1,
    "ignore_eos": True,
    "stop": ["a"],
    "stop_token_ids": [1],
    "logprobs": True,
    "top_logprobs": 0,
    "stream": True,
    "timeline": True,
    "user": "u",
    "metadata": {"a": "b"},
    "n": 1,
}


@pytest.mark.parametrize("name", [*OPTIONAL, *NOT_SERVED, "stream_options"])
def test_null_equals_absent(name: str) -> None:
    assert parse(**{name: None}) == parse()


def test_all_null_at_once() -> None:
    assert parse(**dict.fromkeys([*OPTIONAL, *NOT_SERVED])) == parse()


@pytest.mark.parametrize("name", [n for n in OPTIONAL if n not in ("user", "metadata", "n")])
def test_a_served_field_changes_the_call(name: str) -> None:
    if name != "top_logprobs":
        assert parse(**{name: OPTIONAL[name]}) != parse()


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


HI = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("fields", "value", "limit"),
    [
        ({"messages": [HI] * 6}, 6, 5),
        ({"messages": [{"role": "user", "content": [IMAGE] * 4}]}, 4, 3),
        ({"stop": list("abcde")}, 5, 4),
        ({"stop": "x" * 9}, 9, 8),
        ({"n": 17}, 17, LIMITS.max_choices),
        ({"logprobs": True, "top_logprobs": 21}, 21, LIMITS.max_top_logprobs),
        ({"min_tokens": 9, "max_tokens": 8}, 9, 8),
        ({"temperature": 2.5}, 2.5, 2),
        ({"logit_bias": {"1": 101}}, 101, 100),
        ({"logit_bias": {"1000": 1}}, 1000, VOCAB - 1),
        ({"stop_token_ids": [3, 1000]}, 1, VOCAB - 1),
        ({"tools": [tool(f"t{i}") for i in range(129)]}, 129, LIMITS.max_tools),
        ({"guided_choice": ["a"] * 1025}, 1025, LIMITS.max_guided_choices),
        ({"guided_regex": "a" * 65537}, 65537, LIMITS.max_grammar_bytes),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_refusal_names_the_field_the_value_and_the_limit(
    fields: dict[str, Any], value: float, limit: float
) -> None:
    error = refused(**fields)
    assert error.param is not None
    assert error.param.split(".")[0].split("[")[0] in fields
    assert {str(value), str(limit)} <= set(re.findall(r"\d+(?:\.\d+)?", error.message))


@pytest.mark.parametrize("name", NOT_SERVED)
def test_what_is_not_served_is_refused_by_name(name: str) -> None:
    error = refused(**{name: {"some": "thing"}})
    assert error.param == name
    assert error.message.startswith(f'{name}: {{"some":"thing"}} is not supported')
    for harmless in NOT_SERVED[name]:
        assert parse(**{name: harmless}) == parse()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"something_new": 1}, "something_new"),
        ({"model": 5}, "model"),
        ({"model": None}, "model"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": -1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"seed": 1.5}, "seed"),
        ({"seed": "1"}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_tokens": 2**63}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": []}, "logit_bias"),
        ({"logit_bias": {"191222": -100}}, "logit_bias.191222"),
        ({"logit_bias": {"1" * 5000: 1}}, "logit_bias." + "1" * 178 + "..." + "1" * 64),
        ({"logit_bias": {"-1": 5}}, "logit_bias.-1"),
        ({"logit_bias": {"abc": 1}}, "logit_bias.abc"),
        ({"logit_bias": {"²": 1}}, "logit_bias.²"),
        ({"logit_bias": {"0": 101}}, "logit_bias.0"),
        ({"logit_bias": {"0": "1"}}, "logit_bias.0"),
        ({"stop_token_ids": [10**9]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
        ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a", 5]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": "123456789"}, "stop"),
        ({"stop": list("abcde")}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
        ({"stream": True, "stream_options": [1]}, "stream_options"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "1e400"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty"])
def test_numbers_that_are_none_are_refused(name: str, number: str) -> None:
    body = f'{{"model":"m","messages":[{{"role":"user","content":"a"}}],"{name}":{number}}}'
    with pytest.raises(EpdError) as caught:
        parse_body(body.encode(), LIMITS, VOCAB)
    assert caught.value.mapping.http_status == 400


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"5", b'"a"', b"\xff", b"[" * 10000])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(EpdError) as caught:
        parse_body(body, LIMITS, VOCAB)
    assert caught.value.mapping.http_status == 400


@pytest.mark.parametrize("value", [1e-6, 1e-7, 5e-324, 0, 0.0, -0.0])
def test_a_tiny_temperature_is_greedy(value: float) -> None:
    assert str(parse(temperature=value).generation.sampling.temperature) == "0.0"


def test_stop_may_be_a_string_or_a_list() -> None:
    assert parse(stop="five").generation.stop == ("five",)
    assert parse(stop=["five", "six", "five"]).generation.stop == ("five", "six")


def test_both_names_of_max_tokens() -> None:
    assert parse(max_tokens=5).generation.max_tokens == 5
    assert parse(max_completion_tokens=6).generation.max_tokens == 6
    assert parse(max_tokens=6, max_completion_tokens=6).generation.max_tokens == 6


def test_top_k_of_minus_one_is_off() -> None:
    assert parse(top_k=-1).generation.sampling.top_k == 0


# --- messages ----------------------------------------------------------------------------


def messages(*items: Any) -> ChatCall:
    return parse(messages=list(items))


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_parts_keep_their_order() -> None:
    call = messages(user([{"type": "text", "text": "A"}, IMAGE, {"type": "text", "text": "B"}]))
    assert call.conversation.messages[0].parts == (TextPart("A"), ImagePart(0), TextPart("B"))
    assert call.conversation.images[0].param == "messages[0].content[1].image_url.url"


def test_images_are_counted_over_all_messages() -> None:
    call = messages(user([IMAGE]), {"role": "assistant", "content": "x"}, user([IMAGE]))
    parts = [part for message in call.conversation.messages for part in message.parts]
    assert [part.index for part in parts if isinstance(part, ImagePart)] == [0, 1]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": "iVBOR"},
        {"type": "image_url", "image_url": {"url": "iVBOR", "detail": "high"}},
        {"type": "image_url", "image_url": {"url": "iVBOR", "detail": "original"}},
        {"type": "image", "image": "iVBOR"},
    ],
)
def test_spellings_of_an_image(part: dict[str, Any]) -> None:
    assert messages(user([part])).conversation.images[0].value == "iVBOR"


def test_developer_is_system() -> None:
    call = messages({"role": "developer", "content": "be brief"}, user("a"))
    assert call.conversation.messages[0].role == "system"


@pytest.mark.parametrize(
    "first",
    [
        {"role": "assistant", "content": ""},
        {"role": "system", "content": ""},
        {"role": "assistant", "content": []},
        {"role": "assistant", "content": "x", "tool_calls": [], "refusal": None, "name": None},
    ],
)
def test_empty_turns_of_others_are_fine(first: dict[str, Any]) -> None:
    assert len(messages(first, user("b")).conversation.messages) == 2


def test_who_speaks_is_kept() -> None:
    """OpenAI's names: any script, up to 64 characters."""
    names = ["example_user", "Zoë-漢.1", "n" * 64]
    roles = ["developer", "user", "assistant"]
    said = [
        {"role": role, "content": "a", "name": name}
        for role, name in zip(roles, names, strict=True)
    ]
    call = messages(*said, user("b"))
    assert [message.name for message in call.conversation.messages] == [*names, ""]


def test_strings_are_strings() -> None:
    text = '{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}'
    assert messages(user(text)).conversation.images == ()


@pytest.mark.parametrize(
    ("value", "param"),
    [
        (None, "messages"),
        ("hi", "messages"),
        ([], "messages"),
        ([user("a")] * 6, "messages"),
        (["hi"], "messages[0]"),
        ([user("")], "messages"),
        ([user("  \n")], "messages"),
        ([user([])], "messages"),
        ([{"role": "system", "content": "a"}], "messages"),
        ([{"content": "a"}], "messages[0].role"),
        ([{"role": "tool", "content": "a"}], "messages[0].tool_call_id"),
        (
            [user("a"), {"role": "tool", "tool_call_id": "x", "content": "a"}],
            "messages[1].tool_call_id",
        ),
        ([{"role": "function", "content": "a"}], "messages[0].role"),
        ([{"role": 5, "content": "a"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([user(None)], "messages[0].content"),
        ([user(5)], "messages[0].content"),
        ([{"role": "assistant", "content": None}, user("a")], "messages[0].content"),
        *(
            ([{**user("a"), "name": name}], "messages[0].name")
            for name in (5, "", "a b", "a\n", "<|im_end|>", "a/b", "a\\b", "n" * 65)
        ),
        ([{**user("a"), "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls"),
        ([{**user("a"), "mood": "good"}], "messages[0].mood"),
        ([user(["a"])], "messages[0].content[0]"),
        ([user([{"text": "a"}])], "messages[0].content[0].type"),
        ([user([{"image_url": {"url": "x"}}])], "messages[0].content[0].type"),
        ([user([{"type": "text"}])], "messages[0].content[0].text"),
        ([user([{"type": "text", "text": 5}])], "messages[0].content[0].text"),
        ([user([{"type": "text", "text": "a", "x": 1}])], "messages[0].content[0].x"),
        ([user([{"type": "image_url"}])], "messages[0].content[0].image_url"),
        ([user([{"type": "image_url", "image_url": {}}])], "messages[0].content[0].image_url.url"),
        (
            [user([{"type": "image_url", "image_url": {"url": "x", "detail": "huge"}}])],
            "messages[0].content[0].image_url.detail",
        ),
        ([user([{"type": "video_url", "video_url": "x"}])], "messages[0].content[0].type"),
        ([user([{"type": "hologram"}])], "messages[0].content[0].type"),
        ([user([IMAGE] * 4)], "messages[0].content[3].image_url.url"),
    ],
)
def test_bad_messages_are_named(value: Any, param: str) -> None:
    assert refused(messages=value).param == param


def test_a_lone_surrogate_never_reaches_the_tokenizer() -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"a\\ud800b"}]}'
    with pytest.raises(EpdError) as caught:
        parse_body(body, LIMITS, VOCAB)
    assert caught.value.mapping.http_status == 400
