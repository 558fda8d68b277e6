"""Every request has an id and a line in the log, whatever becomes of it; over both APIs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Iterator
from typing import Any

import aiohttp
import grpc.aio
import pytest

from epd.obs import logs
from gateway.checkpoint import Loaded
from protos.epd.v1 import gateway_pb2 as pb
from protos.epd.v1 import gateway_pb2_grpc
from tests.e2e.gateway_house import CHAT, body, opened
from tests.e2e.http_client import Connection
from tests.e2e.test_gateway_access import KEY, bearer
from tests.e2e.test_gateway_bounds import connect, until_end
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.timeout(60)
MINE = "mine-42"
NAMES = ("x-request-id", "x-client-request-id")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[dict[str, Any]]]:
    """The access log: `request` is what a formatter would write as the request's id."""
    found: list[dict[str, Any]] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage() == "access":
                found.append(vars(record))

    handler = Kept()
    handler.addFilter(logs._add_request)
    logger = logging.getLogger("gateway")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


async def until(lines: list[Any], count: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while len(lines) < count:
            await asyncio.sleep(0.01)


REQUESTS: list[tuple[str, str, Any, bool, int, str]] = [
    ("POST", CHAT, body(), True, 200, "chatcmpl-"),
    ("POST", CHAT, body(stream=True), True, 200, "chatcmpl-"),
    ("POST", CHAT, body(temperature=9), True, 400, "chatcmpl-"),
    ("POST", CHAT, body(), False, 401, "chatcmpl-"),
    ("POST", CHAT, body(user="x" * 1_500_000), True, 413, "chatcmpl-"),
    ("POST", "/v1/completions", {"prompt": "a"}, True, 400, "cmpl-"),
    ("POST", "/v1/responses", {"model": "demo", "input": "a"}, True, 200, "resp-"),
    ("POST", "/tokenize", {"prompt": "a"}, True, 200, "req-"),
    ("POST", "/tokenize", {"prompt": ""}, True, 400, "req-"),
    ("POST", "/detokenize", {"tokens": [5]}, True, 200, "req-"),
    ("POST", "/detokenize", {"tokens": [5]}, False, 401, "req-"),
    ("GET", "/v1/models", None, True, 200, "req-"),
    ("GET", "/v1/models", None, False, 401, "req-"),
    ("GET", "/v1/models/other", None, True, 404, "req-"),
    ("GET", "/nothing", None, True, 404, "req-"),
    ("POST", "/nothing", {}, False, 401, "req-"),
    ("GET", CHAT, None, True, 405, "chatcmpl-"),
    ("POST", "/health", {}, False, 405, "req-"),
]


@pytest.mark.parametrize(("method", "path", "asked", "key", "status", "prefix"), REQUESTS)
async def test_over_http(
    loaded: Loaded,
    lines: list[dict[str, Any]],
    method: str,
    path: str,
    asked: Any,
    key: bool,
    status: int,
    prefix: str,
) -> None:
    async with opened(loaded, api_keys=(KEY,)) as house:
        data = b"" if asked is None else json.dumps(asked).encode()
        headers: dict[str, Any] = {"x_request_id": MINE, **(bearer(KEY) if key else {})}
        sent = await Connection.send(house.http, method, path, data, **headers)
        reply = await sent.reply()
        await until(lines, 1)
    assert reply.status == status, reply.body
    assert reply.headers["x-request-id"].startswith(prefix)
    assert reply.headers["x-client-request-id"] == MINE
    (line,) = lines
    assert line["request"] == reply.headers["x-request-id"]
    assert (line["method"], line["path"], line["status"]) == (method, path, status)
    assert (line["key"] == "?") is (not key)


async def test_a_fault_of_ours_has_one_too(
    loaded: Loaded, lines: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: Any) -> Any:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr("gateway.app.detokenize", breaks)
    async with opened(loaded, cors_origins=("https://a.example",)) as house:
        data = json.dumps({"tokens": [5]}).encode()
        origin: dict[str, Any] = {"origin": "https://a.example"}
        sent = await Connection.send(house.http, "POST", "/detokenize", data, **origin)
        reply = await sent.reply()
        await until(lines, 1)
    identity = reply.headers["x-request-id"]
    assert reply.status == 500
    assert reply.headers["access-control-allow-origin"] == "https://a.example"
    assert identity in reply.json()["error"]["message"]
    assert b"secret" not in reply.body
    assert [(line["request"], line["status"]) for line in lines] == [(identity, 500)]


async def test_limits_of_a_key(loaded: Loaded, lines: list[dict[str, Any]]) -> None:
    async with opened(loaded, requests_per_minute=1) as house:
        assert (await house.chat()).status == 200
        reply = await house.chat()
        await until(lines, 2)
    assert reply.status == 429
    assert reply.headers["retry-after"]
    assert lines[1]["request"] == reply.headers["x-request-id"]
    assert lines[0]["request"] != lines[1]["request"]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03", 400),  # TLS, to a port without it
        (b"HELLO\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: epd\r\ncontent-length: -1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: epd\r\na: " + b"b" * 70_000, 431),
        (b"GET / HTTP/1.1\r\nho", 408),
    ],
)
async def test_what_is_no_request_yet(
    loaded: Loaded, lines: list[dict[str, Any]], sent: bytes, status: int
) -> None:
    async with opened(loaded, head_s=0.5) as house:
        reader, writer = await connect(house)
        writer.write(sent)
        async with asyncio.timeout(LIMIT_S):
            read = await until_end(reader)
        writer.close()
        await until(lines, 1)
    head, _, rest = read.decode().partition("\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ")
    assert json.loads(rest)["error"]["message"]
    assert f"x-request-id: {lines[0]['request']}\r\n" in head
    assert [line["status"] for line in lines] == [status]


async def test_one_connection_too_many(loaded: Loaded, lines: list[dict[str, Any]]) -> None:
    async with opened(loaded, max_connections=1) as house:
        _, held = await connect(house)
        reader, writer = await connect(house)
        async with asyncio.timeout(LIMIT_S):
            read = (await reader.read()).decode()
        assert f"x-request-id: {lines[0]['request']}\r\n" in read
        assert lines[0]["status"] == 503
        for one in (held, writer):
            one.close()


async def test_probes_have_an_id_and_no_line(loaded: Loaded, lines: list[dict[str, Any]]) -> None:
    async with opened(loaded) as house:
        for path in ("/health", "/ready", "/metrics", "/version"):
            reply = await (await Connection.send(house.http, "GET", path)).reply()
            assert reply.headers["x-request-id"].startswith("req-")
        assert lines == []


OPENAIS = (
    "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,"
    "x-stainless-package-version,x-stainless-retry-count,x-stainless-runtime,"
    "x-stainless-runtime-version,x-stainless-timeout,x-request-id"
)
"""What OpenAI's own client sends from a page."""


async def test_pages_may_send_and_read_what_clients_need(
    loaded: Loaded, lines: list[dict[str, Any]]
) -> None:
    page = {"origin": "https://a.example"}
    wanted = {
        **page,
        "access-control-request-method": "POST",
        "access-control-request-headers": OPENAIS,
    }
    settings: dict[str, Any] = {"cors_origins": ("https://a.example",), "api_keys": (KEY,)}
    async with (
        opened(loaded, **settings, requests_per_minute=1) as house,
        aiohttp.ClientSession() as session,
    ):
        url = f"http://{house.http}{CHAT}"
        asked = await session.options(url, headers=wanted)
        assert asked.status == 200
        allowed = {
            name.strip() for name in asked.headers["access-control-allow-headers"].split(",")
        }
        assert allowed >= set(OPENAIS.split(","))
        mine = {**page, **bearer(KEY), "x-request-id": MINE}
        for headers, status in ((mine, 200), (mine, 429), (page, 401)):
            reply = await session.post(url, json=body(), headers=headers)
            assert reply.status == status
            assert reply.headers["access-control-allow-origin"] == "https://a.example"
            exposed = reply.headers["access-control-expose-headers"].split(", ")
            assert set(exposed) == {*NAMES, "retry-after", "x-should-retry"}
            assert NAMES[0] in reply.headers
        foreign = {**wanted, "origin": "https://b.example"}
        assert (await session.options(url, headers=foreign)).status == 400
        await until(lines, 5)
    assert [(line["method"], line["status"]) for line in lines] == [
        ("OPTIONS", 200),
        ("POST", 200),
        ("POST", 429),
        ("POST", 401),
        ("OPTIONS", 400),
    ]


USER = pb.Message(role=pb.ROLE_USER, parts=[pb.ContentPart(text="my secret")])
CALLS: list[tuple[str, Any, bool, str, str]] = [
    ("Chat", pb.ChatRequest(messages=[USER]), True, "OK", "chatcmpl-"),
    ("Chat", pb.ChatRequest(), True, "INVALID_ARGUMENT", "chatcmpl-"),
    ("Chat", pb.ChatRequest(messages=[USER]), False, "UNAUTHENTICATED", "chatcmpl-"),
    ("Complete", pb.CompletionRequest(), True, "INVALID_ARGUMENT", "cmpl-"),
    ("Tokenize", pb.TokenizeRequest(text="a"), True, "OK", "req-"),
    ("Tokenize", pb.TokenizeRequest(), True, "INVALID_ARGUMENT", "req-"),
    ("Detokenize", pb.DetokenizeRequest(ids=[5]), True, "OK", "req-"),
    ("Detokenize", pb.DetokenizeRequest(), True, "INVALID_ARGUMENT", "req-"),
    ("ListModels", pb.ListModelsRequest(), True, "OK", "req-"),
    ("ListModels", pb.ListModelsRequest(), False, "UNAUTHENTICATED", "req-"),
    ("Nothing", pb.ListModelsRequest(), True, "UNIMPLEMENTED", "req-"),
]


async def call_of(channel: grpc.aio.Channel, method: str, request: Any, key: bool) -> Any:
    """The call, when it is over."""
    metadata = [("x-request-id", MINE), *bearer(KEY).items()] if key else [("x-request-id", MINE)]
    start: Any = channel.unary_stream(f"/epd.v1.Gateway/{method}")
    call = start(request.SerializeToString(), metadata=metadata)
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    return call


@pytest.mark.parametrize(("method", "request_", "key", "status", "prefix"), CALLS)
async def test_over_grpc(
    loaded: Loaded,
    lines: list[dict[str, Any]],
    method: str,
    request_: Any,
    key: bool,
    status: str,
    prefix: str,
) -> None:
    async with (
        opened(loaded, api_keys=(KEY,)) as house,
        grpc.aio.insecure_channel(house.grpc) as channel,
    ):
        call = await call_of(channel, method, request_, key)
        assert (await call.code()).name == status
        first = dict(await call.initial_metadata() or ())
        last = dict(await call.trailing_metadata() or ())
        await until(lines, 1)
    (line,) = lines
    # grpc.aio's client may see a status first, and forgets the first metadata then.
    assert first or status != "OK"
    assert first.get("x-request-id", line["request"]) == line["request"]
    assert first.get("x-client-request-id", MINE) == MINE
    if status != "OK":
        assert last["x-request-id"] == line["request"]
    assert line["request"].startswith(prefix)
    assert (line["path"], line["status"]) == (f"/epd.v1.Gateway/{method}", status)
    assert "secret" not in str(line)


async def test_a_call_that_is_too_large(loaded: Loaded, lines: list[dict[str, Any]]) -> None:
    async with opened(loaded) as house, grpc.aio.insecure_channel(house.grpc) as channel:
        request = pb.ChatRequest(messages=[USER], client_request_id="x" * 2_000_000)
        stub = gateway_pb2_grpc.GatewayStub(channel)
        call = stub.Chat(request)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(call))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await until(lines, 1)
    assert lines[0]["status"] == "CANCELLED", "by gRPC itself, which says no more"


async def test_a_house_with_nobody_refuses_with_an_id(loaded: Loaded) -> None:
    async with opened(loaded, stages=()) as house:
        reply = await house.chat()
        assert reply.status == 503
        assert reply.headers["x-request-id"]
        assert "retry-after" in reply.headers
