"""The gateway over scripted stages: nothing of a request outlives it, however it ends. What
does keeps the request's pictures, and the connections of its calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio
import psutil
import pytest

from epd.errors import ErrorKind
from epd.jobs import Stage
from epd.obs import logs
from gateway import main
from gateway.answer import Answer
from gateway.attempt import Attempt
from gateway.branch import Branch
from gateway.checkpoint import Loaded
from gateway.encoding import Encoding
from gateway.pipeline import Run
from gateway.request import PlannedRequest
from gateway.streams import StageStream
from protos.epd.v1 import gateway_pb2_grpc
from tests.e2e.fake_stages import Call, fail, hang
from tests.e2e.gateway_house import House, ask, config, opened
from tests.e2e.test_gateway_cancel import leave_at
from tests.uncollected import uncollected
from tests.waiting import until

KINDS = (Answer, Attempt, Branch, Encoding, PlannedRequest, Run, StageStream)
Scenario = Callable[[House], Awaitable[object]]


async def answered(house: House) -> None:
    assert (await house.chat(images=2)).status == 200
    await house.stream(images=1)


async def several_choices(house: House) -> None:
    assert (await house.chat(n=2)).status == 200


async def stopped(house: House) -> None:
    text = (await house.chat()).json()["choices"][0]["message"]["content"]
    assert (await house.chat(stop=text[6:8])).status == 200


def left(point: str, stream: bool) -> Scenario:
    return lambda house: leave_at(house, point, images=1, stream=stream)


def failing(point: str, kind: ErrorKind) -> Scenario:
    async def scenario(house: House) -> None:
        house.script.hooks[point] = fail(kind)
        for stream in (False, True):
            await house.chat(images=1, stream=stream)

    return scenario


async def unforeseen(house: House) -> None:
    async def bug(call: Call) -> None:
        raise ZeroDivisionError

    house.script.hooks["decode.fetch"] = bug
    assert (await house.chat(images=1)).status == 500


def dying(point: str) -> Scenario:
    """A worker that ends in the middle, without a word."""

    async def scenario(house: House) -> None:
        async def die(call: Call) -> None:
            await call.worker.stop()
            await hang(call)

        house.script.hooks[point] = die
        assert (await house.chat(images=1)).status == 503

    return scenario


async def taken_over(house: House) -> None:
    await house.add(Stage.DECODE, "another")
    house.script.hooks["decode.fetch"] = fail(ErrorKind.TRANSFER_FAILED, times=1)
    assert (await house.chat(images=1, n=2)).status == 200


SCENARIOS = {
    "answered": answered,
    "several choices": several_choices,
    "a stop string": stopped,
    "left in encode": left("encode.run", stream=False),
    "left in prefill": left("prefill.first", stream=True),
    "left in decode": left("decode.token", stream=False),
    "left in decode's stream": left("decode.token", stream=True),
    "encode fails": failing("encode.run", ErrorKind.INVALID_IMAGE),
    "prefill is full": failing("prefill.job", ErrorKind.OVERLOADED),
    "decode can't read": failing("decode.fetch", ErrorKind.TRANSFER_FAILED),
    "damaged": failing("decode.fetch", ErrorKind.CHECKSUM_MISMATCH),
    "a fault of ours": unforeseen,
    "encode dies": dying("encode.run"),
    "prefill dies": dying("prefill.first"),
    "decode dies": dying("decode.token"),
    "another decode": taken_over,
}


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
async def test_nothing_of_a_request_outlives_it(house: House, scenario: Scenario) -> None:
    with uncollected(*KINDS) as alive:
        await scenario(house)
        await house.settled()
        await until(lambda: not alive(), limit_s=10)


async def test_nothing_of_a_request_over_grpc_outlives_it(house: House) -> None:
    with uncollected(*KINDS) as alive:
        async with grpc.aio.insecure_channel(house.grpc) as channel:
            chat = gateway_pb2_grpc.GatewayStub(channel).Chat
            assert [event async for event in chat(ask())]
            house.script.hooks["decode.fetch"] = fail(ErrorKind.TRANSFER_FAILED)
            with pytest.raises(grpc.aio.AioRpcError):
                assert [event async for event in chat(ask())]
            house.script.hooks["decode.fetch"] = hang
            call = chat(ask())
            await call.read()
            call.cancel()
            await house.settled()
            await until(lambda: not alive(), limit_s=10)


async def test_a_worker_that_is_lost_keeps_no_connection(loaded: Loaded) -> None:
    """One that was silent for too long lives, behind a link that is cut, say; its connection
    would be there until TCP gives it up."""
    async with opened(loaded, dead_s=0.5) as house:
        decode = next(fake for fake in house.fakes if fake.stage is Stage.DECODE)
        port = int(decode.address.rpartition(":")[2])

        def connections() -> int:
            ends = psutil.Process().net_connections("tcp")
            dialled = (end for end in ends if end.raddr and end.raddr.port == port)
            return sum(end.status == psutil.CONN_ESTABLISHED for end in dialled)

        async def fall_silent(call: Call) -> None:
            decode.beating.clear()
            await hang(call)

        house.script.hooks["decode.token"] = fall_silent
        with uncollected():
            assert (await house.chat(images=1)).status == 503
            await house.settled()
            await until(lambda: not connections(), limit_s=20)


@pytest.mark.parametrize("part", ["sweep_forever", "pulse"])
async def test_a_gateway_does_not_outlive_what_it_can_not_be_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], part: str
) -> None:
    """Without its sweeper, say, it would send requests to dead workers for ever."""

    async def broken(_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(main, part, broken)
    monkeypatch.setattr(logs, "setup", lambda *_: None)
    with pytest.raises(ZeroDivisionError):
        await main.serve(config())
    assert "READY" in capsys.readouterr().out
