"""Messages of very many small values are refused before they are parsed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.errors import EpdError
from gateway import grpc_wire
from protos.epd.v1 import gateway_pb2 as pb

MANY = grpc_wire.MOST_VALUES + 1
PARTS = pb.Message(role=pb.ROLE_USER, parts=[pb.ContentPart()] * MANY)
HOSTILE = {
    "messages": b"\x0a\x00" * MANY,
    "parts of a message": pb.ChatRequest(messages=[PARTS]).SerializeToString(),
    "unknown fields": b"\xa2\x06\x00" * MANY,
    "numbers": b"\xa0\x06\x01" * MANY,
    "biases": pb.ChatRequest(
        options=pb.GenerationOptions(logit_bias=dict.fromkeys(range(MANY // 2), 1.0))
    ).SerializeToString(),
}
read = grpc_wire.bounded(pb.ChatRequest.FromString)


@pytest.mark.parametrize("name", HOSTILE)
def test_too_many_values(name: str) -> None:
    with pytest.raises(EpdError, match="65537 values, at most 65536 are allowed"):
        read(HOSTILE[name])


def test_a_large_picture_is_one_value() -> None:
    picture = pb.ContentPart(image=b"\x0a\x00" * 5_000_000)
    request = pb.ChatRequest(messages=[pb.Message(parts=[picture])])
    assert read(request.SerializeToString()) == request


def test_packed_ids_are_one_value() -> None:
    request = pb.CompletionRequest(ids=pb.TokenIds(ids=range(200_000)))
    parse = grpc_wire.bounded(pb.CompletionRequest.FromString)
    assert parse(request.SerializeToString()) == request


@given(st.binary(max_size=200))
def test_any_bytes_are_counted_or_left_to_the_parser(data: bytes) -> None:
    grpc_wire.check(data, pb.ChatRequest.DESCRIPTOR)


LIGHT = {
    "a question": pb.ChatRequest(messages=[pb.Message(parts=[pb.ContentPart(text="Hello")])]),
    "a picture": pb.ChatRequest(messages=[pb.Message(parts=[pb.ContentPart(image=b"[," * 9000)])]),
}
HEAVY = {
    "many parts": pb.ChatRequest(messages=[pb.Message(parts=[pb.ContentPart()] * 101)]),
    "many ids": pb.CompletionRequest(ids=pb.TokenIds(ids=[7] * 101)),
    "JSON": pb.ChatRequest(tools=[pb.Tool(name="f", parameters="[" * 101)]),
}


@pytest.mark.parametrize("name", LIGHT)
def test_what_is_read_at_once(name: str) -> None:
    message = LIGHT[name]
    assert grpc_wire.is_light(message.SerializeToString(), message.DESCRIPTOR, 100)


@pytest.mark.parametrize("name", HEAVY)
def test_what_is_not(name: str) -> None:
    message = HEAVY[name]
    assert not grpc_wire.is_light(message.SerializeToString(), message.DESCRIPTOR, 100)
