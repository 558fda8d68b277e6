"""Cases RPC-*: messages, cancelling and slow readers of the public gRPC API."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import grpc.aio
import psutil
import pytest

from epd.client import AsyncClient, Client, user
from epd.config import RpcConfig
from epd.errors import EpdError
from epd.jobs import Stage
from epd.rpc.handlers import finish
from gateway import grpc_receipt
from gateway.streams import Connections, StageFault
from gateway.worker import Card, Worker
from protos.epd.v1 import gateway_pb2_grpc
from tests.e2e.fake_stages import hang
from tests.e2e.gateway_house import House, ask, ask_much
from tests.waiting import LIMIT_S

DEAD = "127.0.0.1:1"


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


async def test_rpc_02_cancelled_streams_leave_nothing(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leak of grpc.aio's is of some hundred bytes: what shows it is that a handler that was
    cancelled ends so."""
    house.script.hooks["decode.token"] = hang
    process = psutil.Process()
    ends: list[type[BaseException] | None] = []

    async def watched(result: Any, context: Any) -> Any:
        try:
            answer = await finish(result, context)
        except BaseException as end:
            ends.append(type(end))
            raise
        ends.append(None)
        return answer

    monkeypatch.setattr(grpc_receipt, "finish", watched)

    async def cancelled(stub: gateway_pb2_grpc.GatewayAsyncStub) -> None:
        call = stub.Chat(ask())
        await anext(aiter(call))
        call.cancel()

    async with grpc.aio.insecure_channel(house.grpc) as channel:
        stub = gateway_pb2_grpc.GatewayStub(channel)
        before = 0
        for number in range(120):
            await cancelled(stub)
            if number % 4 == 3:
                await house.settled()
            if number == 20:  # warm
                gc.collect()
                before = process.memory_info().rss
        await house.settled()
    assert ends == [asyncio.CancelledError] * 120
    gc.collect()
    assert process.memory_info().rss - before < 20 << 20


def alive(name: str) -> int:
    gc.collect()
    return sum(type(found).__name__ == name for found in gc.get_objects())


async def test_rpc_03_calls_to_a_dead_server_leave_nothing() -> None:
    """Of the gateway's calls to stages, and of `epd.client`'s. At length: make soak-gateway."""
    # Tests before this one, in the same process, may have left some of theirs.
    names = ("StageStream", "UnaryStreamCall", "_MultiThreadedRendezvous")
    before = {name: alive(name) for name in names}
    connections = Connections(RpcConfig())
    card = Card(DEAD, 1, frozenset({Stage.PREFILL}), fingerprint="", dtype="")
    worker = Worker(card, last_seen=0.0)
    for _ in range(200):
        stream = connections.open(Stage.PREFILL, worker, 5.0, "dead")
        with pytest.raises(StageFault):
            await stream.next()
        await stream.settle(1.0)
    del stream
    assert not worker.streams
    assert alive("StageStream") <= before["StageStream"]
    await connections.close()
    async with AsyncClient(DEAD, timeout_s=5) as client:
        for _ in range(200):
            with pytest.raises(EpdError):
                await client.chat([user("a")])
        assert alive("UnaryStreamCall") <= before["UnaryStreamCall"] + 1

    def blocking() -> None:
        with Client(DEAD, timeout_s=5) as client:
            for _ in range(200):
                with pytest.raises(EpdError):
                    client.chat([user("a")])
            left = alive("_MultiThreadedRendezvous")
            assert left <= before["_MultiThreadedRendezvous"] + 1

    await asyncio.to_thread(blocking)


async def test_rpc_04_a_slow_reader_holds_decode_back(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, made = ask_much(house, monkeypatch)
    async with grpc.aio.insecure_channel(
        house.grpc, options=[("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 14)]
    ) as channel:
        call = gateway_pb2_grpc.GatewayStub(channel).Chat(request)
        await anext(aiter(call))
        async with asyncio.timeout(LIMIT_S):
            previous = -1
            while made[0] != previous or not made[0]:
                previous = made[0]
                await asyncio.sleep(1)
        assert made[0] < 1400, "nobody held decode back"
        call.cancel()
        await house.settled()
    assert len(house.script.jobs_of(Stage.DECODE)) == 1


async def test_rpc_04_a_reader_that_was_slow_gets_all_of_it(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What gathered meanwhile is more than one message may hold."""
    request, made = ask_much(house, monkeypatch)
    house.script.tokens_per_message = 4
    async with grpc.aio.insecure_channel(
        house.grpc, options=[("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 14)]
    ) as channel:
        call = gateway_pb2_grpc.GatewayStub(channel).Chat(request)
        events = aiter(call)
        await anext(events)
        async with asyncio.timeout(LIMIT_S):
            previous = -1
            while made[0] != previous or not made[0]:
                previous = made[0]
                await asyncio.sleep(1)
            rest = [event async for event in events]
    assert sum(len(event.delta.tokens) for event in rest) == len(house.script.output)
    assert rest[-1].finished.usage.completion_tokens == len(house.script.output)
    assert len(house.script.jobs_of(Stage.DECODE)) == 1
