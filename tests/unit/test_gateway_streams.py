"""A call to a stage ends with everything that belongs to it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from epd.errors import EpdError, ErrorKind
from epd.jobs import Stage
from epd.rpc.status import to_status
from gateway import streams
from gateway.streams import StageFault, StageStream
from protos.epd.v1 import encode_pb2, encode_pb2_grpc
from tests.waiting import LIMIT_S, until


async def test_a_call_that_was_given_up_before_it_reached_its_worker_ends() -> None:
    """As to a worker whose link is cut: the first message waits for a head that nobody sends."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        async with grpc.aio.insecure_channel(address) as channel:
            worker: Any = SimpleNamespace(streams=set(), pending=0)
            ended: list[bool] = []
            call = encode_pb2_grpc.EncodeStub(channel).Run(timeout=2 * LIMIT_S)
            stream = StageStream(Stage.ENCODE, worker, call, lambda: ended.append(True))
            stream.send(encode_pb2.EncodeRequest())
            await asyncio.sleep(0.1)  # nothing says that it has dialled
            async with asyncio.timeout(LIMIT_S):
                await stream.settle(0.1)
            assert stream.lost
            assert ended == [True]
            assert not worker.streams


_LOCAL = grpc.StatusCode.INTERNAL, "Internal error from Core", ()


class Broken:
    """A call whose write found it ended: grpc.aio says INTERNAL over, or before, the status
    that its peer sent."""

    def __init__(self) -> None:
        self.status: tuple[grpc.StatusCode, str, Any] = _LOCAL
        self.told: Callable[[Any], None] = lambda call: None
        self.asked = 0

    def add_done_callback(self, told: Callable[[Any], None]) -> None:
        self.told = told

    def __aiter__(self) -> Broken:
        return self

    async def __anext__(self) -> Any:
        empty = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(self.status[0], empty, empty, self.status[1])

    async def code(self) -> grpc.StatusCode:
        return self.status[0]

    async def details(self) -> str:
        self.asked += 1
        return self.status[1]

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata(*self.status[2])

    async def write(self, message: Any) -> None: ...
    async def done_writing(self) -> None: ...


@pytest.mark.parametrize("first", [True, False])
async def test_the_peers_status_counts_whenever_it_comes(
    first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_STATUS_POLLS", 10_000)
    call, sent = Broken(), to_status(EpdError(ErrorKind.OVERLOADED, "full"))
    worker: Any = SimpleNamespace(streams=set(), pending=0, card=SimpleNamespace(address="a:1"))
    stream = StageStream(Stage.ENCODE, worker, call, lambda: None)
    call.status = sent if first else _LOCAL
    call.told(call)
    call.status = _LOCAL
    reading = asyncio.create_task(stream.next())
    if not first:
        await until(lambda: call.asked > 2)
        call.status = sent
    with pytest.raises(StageFault) as caught:
        await asyncio.wait_for(reading, LIMIT_S)
    assert caught.value.error.kind is ErrorKind.OVERLOADED
    assert not caught.value.lost


class Flooding(Broken):
    """More events than anybody takes, until it is cancelled."""

    cancelled = False

    async def __anext__(self) -> Any:
        if self.cancelled:
            raise asyncio.CancelledError
        return encode_pb2.EncodeEvent()

    def cancel(self) -> None:
        self.cancelled = True


async def test_a_call_that_is_given_up_ends_though_nobody_takes_its_events() -> None:
    """A slow client's, to a worker that is lost: else the connection would stay for it."""
    ended: list[bool] = []
    worker: Any = SimpleNamespace(streams=set(), pending=0, card=SimpleNamespace(address="a:1"))
    stream = StageStream(Stage.ENCODE, worker, Flooding(), lambda: ended.append(True))
    await until(lambda: len(stream._inbox) >= streams._INBOX)
    stream.lose(EpdError(ErrorKind.STAGE_UNAVAILABLE, "lost"))
    await until(lambda: ended)
    assert not worker.streams
    async with asyncio.timeout(LIMIT_S):
        await stream.settle(LIMIT_S)
