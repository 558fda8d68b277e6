"""Heavy bodies are read by another process: the event loop is there for everybody meanwhile."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest

from epd.client import user
from gateway.checkpoint import Loaded
from protos.epd.v1 import gateway_pb2 as pb
from protos.epd.v1 import gateway_pb2_grpc
from tests.e2e.gateway_house import CHAT, House, body, opened, raw
from tests.e2e.http_client import Connection
from tests.waiting import LIMIT_S, until

NO_LIMIT = [("grpc.max_send_message_length", -1)]
MANY: dict[str, Any] = {"metadata": {str(at): [] for at in range(5000)}}
"""Fields of a request that is not read at once, and is a request like any other."""


def readers() -> list[psutil.Process]:
    """The processes that read bodies here."""
    children = psutil.Process(os.getpid()).children(recursive=True)
    return [one for one in children if any("gateway.body_process" in arg for arg in _argv(one))]


def _argv(process: psutil.Process) -> list[str]:
    """None of a process that has ended: also other tests of this process had children."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


async def ask(house: House, data: bytes, path: str = CHAT) -> Any:
    reply = await (await Connection.send(house.http, "POST", path, data)).reply()
    return reply.status, reply.json()


async def test_while_a_heavy_body_is_read_others_are_served(loaded: Loaded) -> None:
    async with opened(loaded) as house:
        assert (await ask(house, raw(**MANY)))[0] == 200  # by now there are readers
        stopped = readers()
        assert stopped
        for process in stopped:
            process.send_signal(signal.SIGSTOP)
        heavy = asyncio.create_task(ask(house, raw(**MANY)))
        await until(lambda: house.gateway.service.budget.used)
        for _ in range(5):
            assert (await ask(house, raw()))[0] == 200
        assert not heavy.done()
        for process in stopped:
            process.send_signal(signal.SIGCONT)
        assert (await heavy)[0] == 200


async def test_a_client_that_leaves_meanwhile_leaves_nothing(loaded: Loaded) -> None:
    async with opened(loaded, body_workers=1) as house:
        assert (await ask(house, raw(**MANY)))[0] == 200
        stopped = readers()
        for process in stopped:
            process.send_signal(signal.SIGSTOP)
        budget = house.gateway.service.budget
        waiting = [await Connection.send(house.http, "POST", CHAT, raw(**MANY)) for _ in range(4)]
        await until(lambda: budget.used >= 4 * len(raw(**MANY)))
        for connection in waiting:
            connection.close()
        await until(lambda: not budget.used)
        for process in stopped:
            process.send_signal(signal.SIGCONT)
        assert (await ask(house, raw(**MANY)))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_is_the_same(loaded: Loaded, stream: bool) -> None:
    async with opened(loaded) as house:
        light = await house.chat(images=2, stream=stream, temperature=0)
        heavy = await house.chat(images=2, stream=stream, temperature=0, **MANY)
        assert light.status == heavy.status == 200
        if not stream:
            assert light.json()["choices"] == heavy.json()["choices"]
            assert light.json()["usage"] == heavy.json()["usage"]


async def test_a_large_picture_is_a_picture(loaded: Loaded) -> None:
    """Its bytes arrive at the encoder as they were sent."""
    noise = os.urandom(1 << 20)
    asked = body(images=1)
    part = asked["messages"][0]["content"][0]["image_url"]
    head, _, data = part["url"].partition(",")
    file = base64.b64decode(data) + noise  # what is behind a PNG's end is nobody's business
    part["url"] = head + "," + base64.b64encode(file).decode()
    async with opened(loaded, {"max_body_bytes": 4 << 20}) as house:
        status, found = await ask(house, json.dumps(asked).encode())
        assert status == 200, found
        assert readers()


@pytest.mark.parametrize(
    ("path", "data", "words"),
    [
        (CHAT, b'{"messages":' + b"[" * 700 + b"],[" * 3000, "is no JSON"),
        (CHAT, raw(**MANY, top_k="x"), "top_k: must be an integer"),
        (CHAT, raw(**MANY, model="other"), "'other' is not served here"),
        ("/tokenize", json.dumps({"prompt": [1] * 9000}).encode(), "context"),
        ("/detokenize", json.dumps({"tokens": [1] * 9000}).encode(), "9000 ids"),
        ("/v1/completions", json.dumps({"model": "demo", "prompt": "a" * 1_010_000}).encode(), ""),
    ],
)
async def test_faults_are_named(loaded: Loaded, path: str, data: bytes, words: str) -> None:
    async with opened(loaded) as house:
        status, found = await ask(house, data, path)
        assert status == 400
        assert words in found["error"]["message"]


async def test_lists_in_lists_by_the_million_are_not_parsed(loaded: Loaded) -> None:
    """With a comma for each thousand: 90 bytes of memory for two on the wire."""
    one = b"[" * 900 + b"]" * 900
    data = b'{"messages":[' + b",".join([one] * 4000) + b"]}"
    async with opened(loaded, {"max_body_bytes": 8 << 20}) as house:
        status, found = await ask(house, data)
        assert (status, found["error"]["code"]) == (400, "invalid_request")
        assert "more than 1000000 values" in found["error"]["message"]


# --- gRPC ------------------------------------------------------------------------------------


HEAVY = {"max_stop_token_ids": 4096}
"""Limits under which there are messages of so many values."""


def heavy_message(**fields: Any) -> pb.ChatRequest:
    """More than is read at once, and a request like any other."""
    options = pb.GenerationOptions(max_tokens=4, temperature=0, stop_token_ids=[900] * 4096)
    return pb.ChatRequest(messages=[user("what is it?")], options=options, **fields)


async def chat(house: House, request: pb.ChatRequest) -> list[pb.ChatEvent]:
    async with grpc.aio.insecure_channel(house.grpc, options=NO_LIMIT) as channel:
        call = gateway_pb2_grpc.GatewayStub(channel).Chat(request, timeout=LIMIT_S)
        return [event async for event in call]


async def test_a_heavy_message_keeps_its_name(loaded: Loaded) -> None:
    async with (
        opened(loaded, HEAVY) as house,
        grpc.aio.insecure_channel(house.grpc, options=NO_LIMIT) as channel,
    ):
        call = gateway_pb2_grpc.GatewayStub(channel).Chat(heavy_message(client_request_id="mine"))
        told = dict(await call.initial_metadata())
        assert told["x-client-request-id"] == "mine"
        assert [event async for event in call][-1].HasField("finished")
        assert readers()


async def test_while_a_heavy_message_is_read_others_are_served(loaded: Loaded) -> None:
    async with opened(loaded, HEAVY) as house:
        assert (await chat(house, heavy_message()))[-1].HasField("finished")
        stopped = readers()
        assert stopped
        for process in stopped:
            process.send_signal(signal.SIGSTOP)
        waiting = asyncio.create_task(chat(house, heavy_message()))
        await until(lambda: house.gateway.service.budget.used)
        for _ in range(3):
            assert await chat(house, pb.ChatRequest(messages=[user("Hello")]))
        assert not waiting.done()
        for process in stopped:
            process.send_signal(signal.SIGCONT)
        assert (await waiting)[-1].HasField("finished")


async def test_a_large_picture_is_a_picture_over_grpc(loaded: Loaded) -> None:
    part = body(images=1)["messages"][0]["content"][0]["image_url"]["url"]
    file = base64.b64decode(part.partition(",")[2]) + os.urandom(1 << 20)
    async with opened(loaded, {"max_body_bytes": 4 << 20}) as house:
        events = await chat(house, pb.ChatRequest(messages=[user(file, "what is it?")]))
        assert events[0].accepted.image_tokens
        assert readers()


@pytest.mark.parametrize(
    ("method", "data", "words"),
    [
        ("Chat", b"\x0a\x00" * 100_000, "at most 65536 are allowed"),
        ("Chat", b"\xff" * (1 << 21), "not one of this method's"),
        (
            "Complete",
            pb.CompletionRequest(ids=pb.TokenIds(ids=[1] * 90_000)).SerializeToString(),
            "the prompt has 90000",
        ),
        ("Tokenize", pb.TokenizeRequest(text="a" * (1 << 21)).SerializeToString(), "can't fit"),
        ("Detokenize", pb.DetokenizeRequest(ids=[1] * 9000).SerializeToString(), "9000 ids"),
        ("ListModels", b"\xa2\x06\x00" * 9000, "too many for this method"),
    ],
)
async def test_faults_of_heavy_messages_are_named(
    loaded: Loaded, method: str, data: bytes, words: str
) -> None:
    async with (
        opened(loaded, {"max_body_bytes": 4 << 20}) as house,
        grpc.aio.insecure_channel(house.grpc, options=NO_LIMIT) as channel,
    ):
        call: Any = channel.stream_stream(f"/epd.v1.Gateway/{method}")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call(iter([data]), timeout=LIMIT_S):
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert words in (caught.value.details() or "")
