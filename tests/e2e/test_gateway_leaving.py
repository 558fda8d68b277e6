"""The gateway over scripted stages: what is left of its requests when its grace is over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc.aio
import pytest

from gateway.app import counts
from protos.epd.v1 import gateway_pb2_grpc
from tests.e2e.fake_stages import Call, hang
from tests.e2e.gateway_house import CHAT, House, ask, body
from tests.e2e.http_client import post
from tests.waiting import LIMIT_S, soon, until

T = TypeVar("T")
SAID = "the gateway is shutting down"
ROUTES = {
    CHAT: body(),
    "/v1/completions": {"model": "demo", "prompt": "what?", "max_tokens": 64},
    "/v1/responses": {"model": "demo", "input": "what?"},
}


async def end_of(house: House, point: str, request: Coroutine[Any, Any, T]) -> T:
    """What comes of a request that hangs at `point` when the gateway leaves, which has no time
    to wait for it."""
    reached = asyncio.Event()

    async def stall(call: Call) -> None:
        if point != "decode.token" or call.token == 3:
            reached.set()
            await hang(call)

    house.script.hooks[point] = stall
    asked = asyncio.create_task(request)
    async with asyncio.timeout(LIMIT_S):
        await reached.wait()
        await house.gateway.drain(0.0)
        return await asked


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_outlasts_the_grace_ends_with_a_typed_error(
    house: House, route: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    sent = post(house.http, route, ROUTES[route] | {"stream": stream})
    reply = await end_of(house, "decode.token", sent)
    if not stream:
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        assert SAID in reply.json()["error"]["message"]
    else:
        assert reply.status == 200
        assert reply.body.count(SAID.encode()) == 1
    await house.settled()
    assert not [line for line in caplog.records if line.levelno >= logging.ERROR]


async def test_a_call_that_outlasts_the_grace_ends_with_a_typed_error(house: House) -> None:
    async with grpc.aio.insecure_channel(house.grpc) as channel:

        async def read() -> None:
            async for _ in gateway_pb2_grpc.GatewayStub(channel).Chat(ask()):
                pass

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await end_of(house, "decode.token", read())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert SAID in (caught.value.details() or "")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_without_output_ends_with_a_status(house: House, stream: bool) -> None:
    reply = await end_of(house, "prefill.job", house.chat(stream=stream))
    assert reply.status == 503
    assert SAID in reply.json()["error"]["message"]


async def test_a_body_that_is_on_its_way_ends_with_a_status(house: House) -> None:
    host, _, port = house.http.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n"
    writer.write(f"{head}expect: 100-continue\r\n\r\n".encode())
    await until(lambda: counts(house.gateway.service)["held_bytes"] == 1000)
    with soon(20.0, instead_of="the time that a body may take (60 s)"):
        await house.gateway.drain(0.0)
        assert await reader.readline() == b"HTTP/1.1 100 Continue\r\n"
        await reader.readline()
        assert await reader.readline() == b"HTTP/1.1 503 Service Unavailable\r\n"
    writer.close()
