"""A call to a stage ends with everything that belongs to it."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import grpc.aio

from epd.jobs import Stage
from gateway.streams import StageStream
from protos.epd.v1 import encode_pb2, encode_pb2_grpc
from tests.waiting import LIMIT_S


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
