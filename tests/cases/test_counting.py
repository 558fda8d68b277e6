"""Cases OPS-07, OPS-08: what the counters say is what happened, and each of them moves."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import grpc.aio
import pytest
from prometheus_client import REGISTRY

from epd.errors import ErrorKind
from protos.epd.v1 import gateway_pb2_grpc
from tests.cases.test_grpc import ask
from tests.e2e.fake_stages import Call, fail
from tests.e2e.gateway_house import CHAT, House, raw
from tests.e2e.http_client import Connection, get, post

pytestmark = pytest.mark.timeout(60)


def ended() -> Counter[str]:
    """Requests for answers, by how they ended."""
    found: Counter[str] = Counter()
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            if sample.name == "epd_requests_total" and sample.labels["stage"] == "gateway":
                found[sample.labels["outcome"]] += int(sample.value)
    return found


def errors() -> int:
    """Typed errors that the gateway sent."""
    return sum(
        int(sample.value)
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == "epd_errors_total" and sample.labels["stage"] == "gateway"
    )


async def left(house: House, **fields: Any) -> None:
    """Go away after the first words, or at once."""
    connection = await Connection.send(house.http, "POST", CHAT, raw(**fields))
    if fields.get("stream"):
        await connection.head()
        await anext(connection.events())
    else:
        await asyncio.sleep(0.2)
    connection.close()
    await house.settled()


async def over_grpc(house: House, request: Any, leave: bool = False) -> None:
    async with grpc.aio.insecure_channel(house.grpc) as channel:
        call = gateway_pb2_grpc.GatewayStub(channel).Chat(request)
        try:
            async for _ in call:
                if leave:
                    call.cancel()
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            pass
    await house.settled()


async def slowly(call: Call) -> None:
    await asyncio.sleep(0.05)


async def test_ops_07_every_request_is_counted_once_however_it_ends(house: House) -> None:
    before, sent = ended(), Counter[str]()
    for stream in (False, True):
        for _ in range(3):
            assert (await house.chat(stream=stream)).status == 200
            assert (await house.chat(stream=stream, temperature="hot")).status == 400
        sent += Counter(ok=3, refused=3)
    assert (await post(house.http, CHAT, b"{")).status == 400
    assert (await house.chat(model="other")).status == 400
    assert (await post(house.http, "/v1/completions", {"prompt": "a", "n": -1})).status == 400
    await over_grpc(house, ask())
    await over_grpc(house, ask("a" * 10_000))
    sent += Counter(ok=1, refused=4)
    house.script.hooks["decode.token"] = slowly
    await left(house, stream=True)
    await left(house)
    await over_grpc(house, ask(), leave=True)
    sent += Counter(cancelled=3)
    house.script.hooks["decode.token"] = fail(ErrorKind.INTERNAL)
    await house.chat(stream=True)
    await house.chat()
    await over_grpc(house, ask())
    house.script.hooks = {"prefill.job": fail(ErrorKind.STAGE_UNAVAILABLE)}
    assert (await house.chat()).status == 503
    house.script.hooks = {"prefill.job": fail(ErrorKind.OVERLOADED)}
    assert (await house.chat()).status == 429
    sent += Counter(failed=4, refused=1)
    await house.settled()
    assert ended() - before == sent


@pytest.mark.parametrize("point", ["prefill.job", "decode.token"])
@pytest.mark.parametrize("stream", [False, True])
async def test_ops_07_an_error_is_counted_once(house: House, point: str, stream: bool) -> None:
    house.script.hooks[point] = fail(ErrorKind.INTERNAL)
    before = errors()
    await house.chat(stream=stream)
    assert errors() - before == 1
    await over_grpc(house, ask())
    # Stages count theirs apart: the scripted ones run in this process under their own names.
    assert errors() - before == 2


async def test_ops_07_other_routes_are_no_requests_for_answers(house: House) -> None:
    before = ended()
    await get(house.http, "/v1/models")
    await get(house.http, "/nothing")
    tokens = await post(house.http, "/tokenize", {"model": "demo", "prompt": "a"})
    assert tokens.status in (200, 400)
    assert ended() == before
