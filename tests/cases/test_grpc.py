"""Cases RPC-*: messages, cancelling and slow readers of the public gRPC API."""

from __future__ import annotations

import asyncio
import gc

import grpc.aio
import psutil
import pytest

from epd.jobs import Stage
from protos.epd.v1 import gateway_pb2, gateway_pb2_grpc
from tests.e2e.fake_stages import Call, hang
from tests.e2e.gateway_house import House

pytestmark = pytest.mark.timeout(60)


def ask(text: str = "what?") -> gateway_pb2.ChatRequest:
    user = gateway_pb2.Message(
        role=gateway_pb2.ROLE_USER, parts=[gateway_pb2.ContentPart(text=text)]
    )
    return gateway_pb2.ChatRequest(messages=[user])


async def code_of(house: House, size: int) -> grpc.StatusCode:
    """The status of a message of about `size` bytes."""
    async with grpc.aio.insecure_channel(
        house.grpc, options=[("grpc.max_send_message_length", -1)]
    ) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in gateway_pb2_grpc.GatewayStub(channel).Chat(ask("a" * size)):
                pass
    return caught.value.code()


async def test_rpc_01_the_message_limit_is_ours(house: House) -> None:
    limit = house.gateway.service.config.limits.max_body_bytes
    assert await code_of(house, limit - 1000) is grpc.StatusCode.INVALID_ARGUMENT
    assert await code_of(house, limit + 1000) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert house.journal == []


async def test_rpc_02_cancelled_streams_leave_nothing(house: House) -> None:
    house.script.hooks["decode.token"] = hang
    process = psutil.Process()

    async def cancelled(stub: gateway_pb2_grpc.GatewayStub) -> None:
        call = stub.Chat(ask())
        await anext(aiter(call))
        call.cancel()

    async with grpc.aio.insecure_channel(house.grpc) as channel:
        stub: gateway_pb2_grpc.GatewayStub = gateway_pb2_grpc.GatewayStub(channel)
        before = 0
        for number in range(120):
            await cancelled(stub)
            if number % 4 == 3:
                await house.settled()
            if number == 20:  # warm
                gc.collect()
                before = process.memory_info().rss
        await house.settled()
    gc.collect()
    assert process.memory_info().rss - before < 20 << 20


async def test_rpc_04_a_slow_reader_holds_decode_back(house: House) -> None:
    made = [0]

    async def count(call: Call) -> None:
        made[0] = call.token

    house.script.output = [300] * 1500
    house.script.alternatives = 800
    house.script.hooks["decode.token"] = count
    request = ask()
    request.options.max_tokens = 1600
    request.options.logprobs = True
    request.options.top_logprobs = 20
    async with grpc.aio.insecure_channel(
        house.grpc, options=[("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 14)]
    ) as channel:
        call = gateway_pb2_grpc.GatewayStub(channel).Chat(request)
        await anext(aiter(call))
        async with asyncio.timeout(20):
            previous = -1
            while made[0] != previous or not made[0]:
                previous = made[0]
                await asyncio.sleep(0.5)
        assert made[0] < 1400, "nobody held decode back"
        call.cancel()
        await house.settled()
    assert len(house.script.jobs_of(Stage.DECODE)) == 1
