"""Case OPS-07: each request is counted once, by how it ended, and each error once."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import grpc.aio
import pytest
from prometheus_client import REGISTRY

from epd.errors import ErrorKind
from gateway.completions import CompletionEncoder
from gateway.openai import Encoder
from gateway.response_encoder import ResponseEncoder
from gateway.schema import parse_body
from protos.epd.v1 import gateway_pb2_grpc
from tests.e2e.fake_stages import Call, fail, hang
from tests.e2e.gateway_house import CHAT, House, ask, raw
from tests.e2e.http_client import Connection, get, post
from tests.waiting import until


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
        await until(lambda: house.gateway.service.inflight)
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


async def not_to_the_end(call: Call) -> None:
    if call.token >= 3:
        await hang(call)


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
    house.script.hooks["decode.token"] = not_to_the_end
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


FORMS: dict[str, tuple[type, dict[str, Any]]] = {
    "chat/completions": (Encoder, {"messages": [{"role": "user", "content": "a"}]}),
    "completions": (CompletionEncoder, {"prompt": "a"}),
    "responses": (ResponseEncoder, {"input": "a"}),
}


@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize(
    ("broken", "stream"),
    [("last", True), ("whole", False), ("__init__", True), ("__init__", False)],
)
async def test_ops_07_an_answer_that_breaks_at_its_end_has_failed(
    house: House, monkeypatch: pytest.MonkeyPatch, path: str, broken: str, stream: bool
) -> None:
    """All tokens were made, and none of that is a success until it was handed over."""

    def breaks(*_: Any) -> bytes:
        raise ZeroDivisionError

    form, asked = FORMS[path]
    before, told = ended(), errors()
    monkeypatch.setattr(form, broken, breaks)
    reply = await post(house.http, f"/v1/{path}", {"model": "demo", "stream": stream, **asked})
    assert (reply.status == 200) is (broken == "last")
    assert b"internal error" in reply.body
    await house.settled()
    assert (ended() - before, errors() - told) == (Counter(failed=1), 1)


async def test_ops_07_a_call_that_breaks_at_its_end_has_failed(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr("gateway.grpc_api._finished", breaks)
    before = ended()
    await over_grpc(house, ask())
    assert ended() - before == Counter(failed=1)


async def test_ops_07_who_leaves_before_the_last_words_has_left(house: House) -> None:
    """The output is complete, and its end was never taken."""
    service, before = house.gateway.service, ended()
    call = parse_body(raw(), service.config.limits, 1024)
    answer = await service.open(call, "id", service.budget.hold())
    parts = answer.parts()
    while answer.reason is None:
        await anext(parts)
    assert service.inflight == 0, "its place is free before its last words are sent"
    assert ended() == before
    answer.cancel()
    answer.finish()
    assert ended() - before == Counter(cancelled=1)


async def test_ops_07_calls_that_may_not_be_or_say_nothing_are_refused(house: House) -> None:
    before = ended()
    async with grpc.aio.insecure_channel(house.grpc) as channel:
        for method in ("Chat", "Complete", "ListModels"):
            start: Any = channel.stream_stream(f"/epd.v1.Gateway/{method}")
            call = start()
            await call.write(b"\xff" * 50)
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert ended() - before == Counter(refused=2)


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
