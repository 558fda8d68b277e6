"""What a gRPC client may hold of the gateway: messages that never come, streams never read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from epd.jobs import Stage
from epd.rpc import server as rpc_server
from gateway import grpc_receipt
from gateway.checkpoint import Loaded
from protos.epd.v1 import gateway_pb2_grpc
from tests.e2e.fake_stages import hang
from tests.e2e.gateway_house import House, ask, ask_much, opened
from tests.waiting import LIMIT_S, until

CHAT = "/epd.v1.Gateway/Chat"
METHODS = [CHAT, "/epd.v1.Gateway/ListModels", "/grpc.health.v1.Health/Check"]


def silent(channel: grpc.aio.Channel, method: str, **call: Any) -> Any:
    """A call that begins, and whose message doesn't come."""
    return channel.stream_stream(method)(**call)


async def status(call: Any, within_s: float = LIMIT_S) -> grpc.StatusCode:
    async with asyncio.timeout(within_s):
        return await call.code()


@pytest.mark.parametrize("method", METHODS)
async def test_a_message_that_never_comes_ends_the_call(loaded: Loaded, method: str) -> None:
    async with (
        opened(loaded, body_s=0.5) as house,
        grpc.aio.insecure_channel(house.grpc) as channel,
    ):
        call = silent(channel, method)
        assert await status(call) is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "message took more than 0.5 s" in await call.details()


async def test_who_may_not_call_is_told_before_the_message(loaded: Loaded) -> None:
    async with (
        opened(loaded, api_keys=("key",)) as house,
        grpc.aio.insecure_channel(house.grpc) as channel,
    ):
        assert await status(silent(channel, CHAT)) is grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", "Bearer key"),)
        call = silent(channel, CHAT, metadata=metadata)
        with pytest.raises(TimeoutError):
            await status(call, 0.5)
        call.cancel()


async def test_only_so_many_messages_may_be_late(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each might be as large as is allowed."""
    monkeypatch.setattr(grpc_receipt, "_PROMPT_S", 0.2)
    async with (
        opened(loaded, {"max_inflight_mib": 2}) as house,
        grpc.aio.insecure_channel(house.grpc) as channel,
    ):
        late = [silent(channel, CHAT) for _ in range(2)]
        await until(lambda: served(CHAT) == 2)
        await asyncio.sleep(0.5)  # only now they are late
        assert await status(silent(channel, CHAT)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        stub = gateway_pb2_grpc.GatewayStub(channel)
        assert [event async for event in stub.Chat(ask())][-1].HasField("finished")
        for call in late:
            call.cancel()


async def test_an_empty_stream_is_no_request(loaded: Loaded) -> None:
    async with opened(loaded) as house, grpc.aio.insecure_channel(house.grpc) as channel:
        call = silent(channel, CHAT)
        await call.done_writing()
        assert await status(call) is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("method", METHODS)
async def test_what_is_no_message_is_the_callers_fault(loaded: Loaded, method: str) -> None:
    bad_text = b"\x0a\x06\x12\x04\x0a\x02\xff\xfe"  # of a ChatRequest: a text that isn't UTF-8
    async with opened(loaded) as house, grpc.aio.insecure_channel(house.grpc) as channel:
        for data in (b"\xff" * 50, bad_text):
            call = silent(channel, method)
            await call.write(data)
            await call.done_writing()
            if data is bad_text and method != CHAT:
                continue  # unknown fields to the others
            assert await status(call) is grpc.StatusCode.INVALID_ARGUMENT
        assert house.journal == []


async def test_small_values_by_the_hundred_thousand_are_not_parsed(loaded: Loaded) -> None:
    async with opened(loaded) as house, grpc.aio.insecure_channel(house.grpc) as channel:
        start: Any = channel.unary_stream(CHAT)
        call = start(b"\x0a\x00" * 100_000)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(call))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "values, at most 65536 are allowed" in (caught.value.details() or "")
        assert house.journal == []


async def test_bytes_of_all_messages_in_flight_are_bounded(loaded: Loaded) -> None:
    async with (
        opened(loaded, {"max_inflight_mib": 1}) as house,
        grpc.aio.insecure_channel(house.grpc) as channel,
    ):
        stub = gateway_pb2_grpc.GatewayStub(channel)
        house.script.hooks["decode.token"] = hang
        large = ask()
        large.client_request_id = "x" * 600_000
        first = stub.Chat(large)
        await anext(aiter(first))
        assert house.gateway.service.budget.used == large.ByteSize()
        second = stub.Chat(large)
        assert await status(second) is grpc.StatusCode.RESOURCE_EXHAUSTED
        first.cancel()


@asynccontextmanager
async def unread(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[House, grpc.aio.Channel, Any, list[int]]]:
    """A call whose client reads its first event only, when the gateway has given it up; and
    how many tokens were made for it."""
    async with opened(loaded, slow_reader_s=1.0) as house:
        request, made = ask_much(house, monkeypatch)
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 14)]
        async with grpc.aio.insecure_channel(house.grpc, options=options) as channel:
            call: Any = gateway_pb2_grpc.GatewayStub(channel).Chat(request)
            assert (await call.read()).HasField("accepted")
            await until(lambda: house.script.jobs_of(Stage.DECODE))
            await until(lambda: not house.gateway.service.inflight)
            await house.settled()
            assert 0 < made[0] < 1400
            yield house, channel, call, made


async def test_a_reader_that_reads_late_is_told_why(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with unread(loaded, monkeypatch) as (_, _, call, made):
        seen = 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:  # noqa: PT012 (a loop)
            while await call.read() is not grpc.aio.EOF:
                seen += 1
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        assert "took nothing of its answer for 1 s" in (caught.value.details() or "")
        assert 0 < seen < made[0]


def served(method: str) -> int:
    """Calls of a method that a grpc.aio server of this process has."""
    names = (task.get_name() for task in asyncio.all_tasks())
    return sum(name == f"HandleExceptions[{method}]" for name in names)


async def test_a_reader_that_never_reads_is_cut_off(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stream alone: the connection goes on."""
    monkeypatch.setattr(rpc_server, "TAKEN_WITHIN_S", 0.5)
    async with unread(loaded, monkeypatch) as (house, channel, call, _):
        await until(lambda: not served(CHAT))
        house.script.output = [300, 301]
        house.script.alternatives = 0
        stub = gateway_pb2_grpc.GatewayStub(channel)
        assert [event async for event in stub.Chat(ask())][-1].HasField("finished")
        # gRPC's core drops what a peer has not read yet when the stream is reset.
        with pytest.raises(grpc.aio.AioRpcError) as caught:  # noqa: PT012 (a loop)
            while await call.read() is not grpc.aio.EOF:
                pass
        assert caught.value.code() is grpc.StatusCode.CANCELLED


async def test_what_unfolds_to_too_much_is_refused_without_a_word(
    loaded: Loaded, caplog: pytest.LogCaptureFixture
) -> None:
    """grpc unfolds no more than the limit, and ends the call itself."""
    async with (
        opened(loaded) as house,
        grpc.aio.insecure_channel(house.grpc) as channel,
    ):
        stub = gateway_pb2_grpc.GatewayStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Chat(ask("a" * (8 << 20)), compression=grpc.Compression.Gzip).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        answer = stub.Chat(ask("a"), compression=grpc.Compression.Gzip)
        assert [event async for event in answer][-1].HasField("finished")
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]
