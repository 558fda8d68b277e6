"""What clients see of the gateway over HTTP, and workers of membership, over scripted stages."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import grpc.aio
import openai
import pytest

from epd.config import Config
from epd.errors import ErrorKind
from epd.jobs import Stage
from epd.rpc.channels import dial
from epd.rpc.membership_client import MembershipClient
from gateway.checkpoint import Loaded
from protos.epd.v1 import membership_pb2
from tests.e2e.fake_stages import Call, fail, hang
from tests.e2e.gateway_house import CHAT, House, body, config
from tests.e2e.http_client import Connection, Reply, get, post
from tests.waiting import LIMIT_S, until


def error_of(reply: Reply, status: int) -> dict[str, Any]:
    assert reply.status == status, reply.body
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


# --- HTTP --------------------------------------------------------------------------------


async def test_openais_own_client_is_content(house: House) -> None:
    client = openai.AsyncOpenAI(base_url=f"http://{house.http}/v1", api_key="x", max_retries=0)
    async with client:
        models = await client.models.list()
        assert [model.id for model in models.data] == ["demo"]
        request: dict[str, Any] = body(images=2, logprobs=True, top_logprobs=0)
        whole = await client.chat.completions.create(**request)
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                **request, stream=True, stream_options={"include_usage": True}
            )
        ]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    entries = whole.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == text
    assert {entry.logprob for entry in entries} == {-0.5}
    assert all(entry.top_logprobs == [] for entry in entries)


async def test_logprobs_of_each_chunk_cover_its_text(house: House) -> None:
    house.script.tokens_per_message = 3
    events = await house.stream(logprobs=True)
    chunks = [e["choices"][0] for e in events if e != "[DONE]" and e["choices"]]
    for chunk in chunks:
        entries = (chunk["logprobs"] or {"content": []})["content"]
        raw = b"".join(bytes(entry["bytes"]) for entry in entries)
        assert raw.decode() == chunk["delta"].get("content", "")


@pytest.mark.parametrize("stream", [True, False])
async def test_bad_input_is_json_and_never_a_stream(house: House, stream: bool) -> None:
    fields: list[tuple[dict[str, Any], str | None]] = [
        ({"messages": []}, "messages"),
        ({"model": "gpt-4"}, "model"),
        ({"temperature": 9}, "temperature"),
        ({"nonsense": 1}, "nonsense"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "a" * 100_000}]}, "messages"),
    ]
    for change, param in fields:
        reply = await house.chat(stream=stream, **change)
        assert error_of(reply, 400)["param"] == param
        assert reply.headers["content-type"] == "application/json"
        assert reply.headers["x-request-id"].startswith("chatcmpl-")
    assert house.journal == []


@pytest.mark.parametrize(
    ("url", "param"),
    [
        ("data:image/png;base64,SGVsbG8gV29ybGQ=", "messages[0].content[0].image_url.url"),
        ("data:image/png;base64,", "messages[0].content[0].image_url.url"),
        ("https://example.com/cat.png", "messages[0].content[0].image_url.url"),
    ],
)
async def test_what_is_no_picture_is_named(house: House, url: str, param: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    reply = await house.chat(messages=[{"role": "user", "content": [part]}])
    assert error_of(reply, 400)["param"] == param
    assert house.journal == []


async def test_an_unknown_model_does_not_say_server_error(house: House) -> None:
    error = error_of(await house.chat(model="gpt-4"), 400)
    assert (error["code"], error["type"]) == ("model_not_found", "invalid_request_error")


async def test_context_length_states_the_numbers(house: House) -> None:
    limit = house.gateway.service.preparer.max_context
    used = (await house.chat(max_tokens=1)).json()["usage"]["prompt_tokens"]
    error = error_of(await house.chat(max_tokens=limit - used + 1), 400)
    assert error["code"] == "context_length_exceeded"
    for number in (limit, limit + 1, used, limit - used + 1):
        assert str(number) in error["message"]
    assert (await house.chat(max_tokens=limit - used)).status == 200


async def test_limits_come_from_the_workers(empty: House) -> None:
    empty.capacity = {"max_context": 40}
    for stage in Stage:
        await empty.add(stage)
    assert empty.gateway.service.preparer.max_context == 40
    error = error_of(await empty.chat(max_tokens=39), 400)
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"model": NaN}', b"\x00"])
async def test_a_body_that_is_no_json_is_400(house: House, raw: bytes) -> None:
    error_of(await post(house.http, CHAT, raw), 400)


async def test_a_body_over_the_cap_is_413(house: House) -> None:
    big = b'{"model": "' + b"a" * (1 << 20) + b'"}'
    assert error_of(await post(house.http, CHAT, big), 413)["code"] == "request_too_large"


async def test_unknown_routes_and_methods_answer_in_json(house: House) -> None:
    error_of(await get(house.http, "/v1/nothing"), 404)
    error_of(await get(house.http, CHAT), 405)
    error_of(await get(house.http, "/v1/models/other"), 404)
    assert (await get(house.http, "/v1/models/demo")).json()["id"] == "demo"


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/version"])
async def test_probes_may_ask_with_head(house: House, path: str) -> None:
    whole = await get(house.http, path)
    reply = await (await Connection.send(house.http, "HEAD", path)).reply()
    assert (reply.status, reply.body) == (whole.status, b"")
    assert reply.headers["content-type"] == whole.headers["content-type"]


@pytest.mark.parametrize(
    ("kind", "asked"), [(ErrorKind.INTERNAL, 1), (ErrorKind.DEADLINE_EXCEEDED, 1)]
)
async def test_openais_client_does_not_ask_again_in_vain(
    house: House, kind: ErrorKind, asked: int
) -> None:
    house.script.hooks["prefill.job"] = fail(kind)
    client = openai.AsyncOpenAI(base_url=f"http://{house.http}/v1", api_key="x", max_retries=2)
    async with client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(**body())
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert len(house.script.jobs_of(Stage.PREFILL)) == asked


async def test_what_may_pass_may_be_asked_again(empty: House) -> None:
    reply = await post(empty.http, CHAT, body())
    assert reply.status == 503
    assert "x-should-retry" not in reply.headers
    assert int(reply.headers["retry-after"]) >= 1


async def test_a_path_with_a_slash_too_many_leads_nowhere_else(house: House) -> None:
    for reply in (await get(house.http, "/v1/models/"), await post(house.http, f"{CHAT}/", body())):
        error_of(reply, 404)
        assert "location" not in reply.headers


async def test_too_many_requests_are_429(house: House) -> None:
    house.script.hooks["prefill.job"] = hang
    most = house.gateway.service.config.limits.max_inflight
    open_ = [await Connection.send(house.http, "POST", CHAT, _body()) for _ in range(most)]
    await until(lambda: house.gateway.service.inflight >= most)
    reply = await house.chat()
    assert error_of(reply, 429)["code"] == "overloaded"
    assert int(reply.headers["retry-after"]) >= 1
    for connection in open_:
        connection.close()
    await house.settled()
    house.script.hooks.clear()
    assert (await house.chat()).status == 200


def _body() -> bytes:
    import json

    return json.dumps(body()).encode()


async def test_bodies_that_are_being_sent_count(house: House) -> None:
    most = house.gateway.service.config.limits.max_inflight
    slow = [
        await asyncio.open_connection("127.0.0.1", int(house.http.rpartition(":")[2]))
        for _ in range(most)
    ]
    for _, writer in slow:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n{{"
        writer.write(head.encode())
        await writer.drain()
    service = house.gateway.service
    await until(lambda: service._receiving == most)
    error_of(await house.chat(), 429)
    for _, writer in slow:
        writer.close()
    await until(lambda: not service._receiving)
    assert (await house.chat()).status == 200


async def test_health_metrics_and_state(house: House) -> None:
    await house.chat()
    assert (await get(house.http, "/health")).status == 200
    page = (await get(house.http, "/metrics")).body.decode()
    assert 'epd_requests_total{outcome="ok",stage="gateway"}' in page
    assert 'epd_phase_seconds_count{phase="prefill",stage="gateway"}' in page
    await house.stream()
    names = ("epd_first_token_seconds", "epd_answer_seconds")
    before = [_count(page, name) for name in names]
    assert all(before)
    page = (await get(house.http, "/metrics")).body.decode()
    assert [_count(page, name) for name in names] == [count + 1 for count in before]
    await house.settled()
    state = (await get(house.http, "/debug/state")).json()
    assert (state["in_flight"], state["runs"], state["streams"]) == (0, 0, 0)
    assert len(state["workers"]) == 3


def _count(page: str, name: str) -> float:
    (found,) = re.findall(rf'^{name}_count{{stage="gateway"}} (\S+)$', page, re.MULTILINE)
    return float(found)


async def test_a_clients_request_id_is_logged(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    reply = await post(house.http, CHAT, body(), x_request_id="mine-42")
    assert reply.headers["x-request-id"] != "mine-42"
    assert any("mine-42" in record.getMessage() for record in caplog.records)


async def test_a_draining_gateway_refuses_what_is_new(house: House) -> None:
    go = asyncio.Event()

    async def wait(call: Call) -> None:
        await go.wait()

    house.script.hooks["decode.fetch"] = wait
    running = asyncio.create_task(house.chat())
    await until(lambda: house.gateway.service.inflight)
    draining = asyncio.create_task(house.gateway.drain(LIMIT_S))
    await until(lambda: house.gateway.service.draining)
    error_of(await house.chat(), 503)
    assert (await get(house.http, "/ready")).status == 503
    assert (await get(house.http, "/health")).status == 200
    go.set()
    assert (await running).status == 200
    await draining


# --- membership --------------------------------------------------------------------------


async def test_a_stranger_is_refused_with_both_values(house: House) -> None:
    hello = membership_pb2.Hello(
        stages=[membership_pb2.STAGE_DECODE],
        address="127.0.0.1:1",
        epoch=9,
        fingerprint="other weights",
        dtype=house.hello["dtype"],
        version=house.hello["version"],
    )
    async with dial(house.membership, house.gateway.service.config.rpc) as channel:
        from protos.epd.v1 import membership_pb2_grpc

        call = membership_pb2_grpc.MembershipStub(channel).Join()
        await call.write(membership_pb2.WorkerReport(hello=hello))
        reply: Any = await call.read()
        assert "other weights" in reply.refused.reason
        assert house.hello["fingerprint"] in reply.refused.reason
        assert await call.read() is grpc.aio.EOF
    assert len(house.gateway.registry.live(Stage.DECODE)) == 1


async def test_the_real_client_joins_reports_and_leaves(empty: House) -> None:
    hello = membership_pb2.Hello(
        stages=[membership_pb2.STAGE_PREFILL], address="127.0.0.1:1", epoch=9, **empty.hello
    )
    beat = membership_pb2.Heartbeat(running=2, waiting=3, steps=7, serving=True)
    client = MembershipClient(
        "prefill", [empty.membership], hello, lambda: beat, empty.gateway.service.config.rpc
    )
    client.start()
    registry = empty.gateway.registry
    await until(lambda: registry.workers and registry.workers[0].steps == 7)
    assert registry.workers[0].load == 5
    client.leave(1.0)
    await until(lambda: registry.workers[0].state == "draining")
    await client.close()
    await until(lambda: not registry.workers)


async def test_a_port_in_use_is_said_so(house: House, loaded: Loaded) -> None:
    from epd.errors import EpdError

    port = int(house.http.rpartition(":")[2])
    tree = config().model_dump()
    tree["gateway"]["http_port"] = port
    other = House(loaded, Config.model_validate(tree))
    with pytest.raises(EpdError, match=str(port)):
        await other.start()
    await other.close()
