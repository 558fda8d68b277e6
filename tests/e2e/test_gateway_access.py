"""API keys, limits of a key, CORS, the access log: over HTTP and gRPC."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import logging
from collections.abc import Hashable
from contextlib import ExitStack
from typing import Any

import aiohttp
import grpc.aio
import openai
import pytest
from google.rpc import error_details_pb2, status_pb2
from PIL import Image

from epd.config import GatewayConfig
from epd.errors import EpdError, ErrorKind
from epd.jobs import Stage
from epd.turns import Turns
from gateway.access import Access
from gateway.checkpoint import Loaded
from protos.epd.v1 import gateway_pb2, gateway_pb2_grpc
from tests.e2e.conftest import grey_png, image_part
from tests.e2e.fake_stages import hang
from tests.e2e.gateway_house import CHAT, House, ask, body, opened
from tests.e2e.http_client import Connection, get, post
from tests.waiting import LIMIT_S, until

KEY, OTHER = "sk-first", "sk-second"


def bearer(key: str) -> dict[str, Any]:
    return {"authorization": f"Bearer {key}"}


async def over_grpc(channel: grpc.aio.Channel, key: str | None) -> list[Any]:
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    call = gateway_pb2_grpc.GatewayStub(channel).Chat(ask(), metadata=metadata)
    return [event async for event in call]


async def test_keys_over_http(loaded: Loaded) -> None:
    async with opened(loaded, api_keys=(KEY, OTHER)) as house:
        for headers in ({}, bearer("sk-firs"), bearer(""), {"authorization": f"Basic {KEY}"}):
            reply = await post(house.http, CHAT, body(), **headers)
            assert reply.status == 401
            assert reply.json()["error"]["code"] == "invalid_api_key"
            assert KEY not in reply.body.decode()
        for key in (KEY, OTHER):
            assert (await post(house.http, CHAT, body(), **bearer(key))).status == 200
        assert (await get(house.http, "/v1/models")).status == 401
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert (await get(house.http, path)).status == 200
        client = openai.AsyncOpenAI(base_url=f"http://{house.http}/v1", api_key="no")
        async with client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()


async def test_keys_over_grpc(loaded: Loaded) -> None:
    async with (
        opened(loaded, api_keys=(KEY,)) as house,
        grpc.aio.insecure_channel(house.grpc) as channel,
    ):
        for key in (None, "sk-firs"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await over_grpc(channel, key)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        stub = gateway_pb2_grpc.GatewayStub(channel)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.ListModels(gateway_pb2.ListModelsRequest())
        assert (await over_grpc(channel, KEY))[-1].WhichOneof("kind") == "finished"


async def test_keys_share_no_cache_entries(loaded: Loaded) -> None:
    """Salt and picture digests are what all caches are keyed by."""
    file = grey_png(96, 96)
    message = gateway_pb2.Message(
        role=gateway_pb2.ROLE_USER,
        parts=[gateway_pb2.ContentPart(image=file), gateway_pb2.ContentPart(text="what?")],
    )

    async def jobs(house: House, keys: tuple[str, ...]) -> list[tuple[bytes, bytes]]:
        """Salt and digest of the same question by each key, over HTTP and over gRPC."""
        first = len(house.script.jobs)
        content = [image_part(file), {"type": "text", "text": "what?"}]
        for key in keys:
            said = body(messages=[{"role": "user", "content": content}])
            assert (await post(house.http, CHAT, said, **bearer(key))).status == 200
            async with grpc.aio.insecure_channel(house.grpc) as channel:
                call = gateway_pb2_grpc.GatewayStub(channel).Chat(
                    gateway_pb2.ChatRequest(messages=[message]),
                    metadata=(("authorization", f"Bearer {key}"),),
                )
                assert [event async for event in call]
        found = [job for stage, job in house.script.jobs[first:] if stage is Stage.PREFILL]
        return [(job.salt, job.items[0].digest) for job in found]

    async with opened(loaded, api_keys=(KEY, OTHER)) as house:
        mine, mine_too, theirs, theirs_too = await jobs(house, (KEY, OTHER))
    assert mine == mine_too
    assert theirs == theirs_too
    assert mine[0] != theirs[0]
    assert mine[1] != theirs[1]
    async with opened(loaded, api_keys=(OTHER, KEY)) as another_gateway:
        assert await jobs(another_gateway, (KEY,)) == [mine, mine]
    async with opened(loaded) as for_all:
        anyone, _ = await jobs(for_all, (KEY,))
    assert anyone[0] == b""
    assert KEY.encode() not in mine[0]


async def test_concurrency_of_a_key_ends_with_the_stream(loaded: Loaded) -> None:
    async with opened(loaded, api_keys=(KEY, OTHER), concurrent_requests=1) as house:
        house.script.hooks["decode.token"] = hang
        raw = json.dumps(body(stream=True)).encode()
        running = await Connection.send(house.http, "POST", CHAT, raw, **bearer(KEY))
        await running.head()
        reply = await post(house.http, CHAT, body(), **bearer(KEY))
        assert (reply.status, reply.headers["retry-after"]) == (429, "1")
        del house.script.hooks["decode.token"]
        assert (await post(house.http, CHAT, body(), **bearer(OTHER))).status == 200
        running.close()
        await house.settled()
        # Its place is given back a moment after its call is over.
        async with asyncio.timeout(LIMIT_S):
            while (await post(house.http, CHAT, body(), **bearer(KEY))).status != 200:
                await asyncio.sleep(0.01)


async def test_whose_requests_are_too_many_is_in_the_log(
    loaded: Loaded, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with opened(loaded, api_keys=(KEY, OTHER), requests_per_minute=1) as house:
        for status in (200, 429):
            assert (await post(house.http, CHAT, body(), **bearer(KEY))).status == status
    lines = [vars(record) for record in caplog.records if record.message == "access"]
    name = hashlib.sha256(KEY.encode()).hexdigest()[:8]
    assert [(line["status"], line["key"]) for line in lines] == [(200, name), (429, name)]


async def test_over_grpc_a_limit_says_when_to_come_again(loaded: Loaded) -> None:
    async with opened(loaded, requests_per_minute=1) as house:
        async with grpc.aio.insecure_channel(house.grpc) as channel:
            await over_grpc(channel, None)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await over_grpc(channel, None)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailing = dict(caught.value.trailing_metadata() or ())
        status = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
        retry = error_details_pb2.RetryInfo()
        assert any(detail.Unpack(retry) for detail in status.details)
        assert 50 < retry.retry_delay.seconds <= 60


@pytest.mark.parametrize(("keys", "level"), [((), "WARNING"), ((KEY,), "INFO")])
async def test_whose_limit_it_is_is_the_same_over_both_apis(
    loaded: Loaded, caplog: pytest.LogCaptureFixture, keys: tuple[str, ...], level: str
) -> None:
    """A key's own is its client's doing. Without keys all have one: that is the service's."""
    caplog.set_level(logging.INFO)
    async with opened(loaded, api_keys=keys, requests_per_minute=1) as house:
        assert (await post(house.http, CHAT, body(), **bearer(KEY))).status == 200
        assert (await post(house.http, CHAT, body(), **bearer(KEY))).status == 429
        async with grpc.aio.insecure_channel(house.grpc) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await over_grpc(channel, KEY)
    said = [one for one in caplog.records if getattr(one, "kind", "") == ErrorKind.OVERLOADED]
    assert [one.levelname for one in said] == [level] * 2
    who = "this key" if keys else "all clients"
    assert all(f"{who} may make 1 requests a minute" in one.getMessage() for one in said)


@pytest.mark.parametrize("keys", [(), (KEY,)])
def test_the_rate_is_a_budget_that_grows(keys: tuple[str, ...]) -> None:
    now = [0.0]
    config = GatewayConfig(api_keys=keys, requests_per_minute=2)
    access = Access(config, 256, lambda: now[0])

    def spend() -> None:
        with access.admit(f"Bearer {KEY}"):
            pass

    spend()
    spend()
    with pytest.raises(EpdError) as caught:
        spend()
    assert caught.value.kind is ErrorKind.OVERLOADED
    assert caught.value.retry_after_s == pytest.approx(30.0)
    assert caught.value.by_client is bool(keys)
    now[0] = 30.0
    spend()
    now[0] = 3600.0
    spend()
    spend()
    with pytest.raises(EpdError):
        spend()


def test_one_key_never_takes_the_last_places() -> None:
    access = Access(GatewayConfig(api_keys=(KEY, OTHER)), most_running=20)
    refusals: list[EpdError] = []
    with ExitStack() as running:

        def fill(key: str) -> int:
            """Requests of this key until one is refused."""
            for taken in range(21):
                try:
                    running.enter_context(access.admit(f"Bearer {key}"))
                except EpdError as refusal:
                    refusals.append(refusal)
                    return taken
            raise AssertionError("took all places")

        assert fill(KEY) == 16
        assert fill(OTHER) == 4
    assert {(r.kind, r.retry_after_s) for r in refusals} == {(ErrorKind.OVERLOADED, 1.0)}
    with ExitStack() as alone:
        only = Access(GatewayConfig(api_keys=(KEY,)), most_running=20)
        for _ in range(20):
            alone.enter_context(only.admit(f"Bearer {KEY}"))


async def test_cors_is_off_until_configured(loaded: Loaded) -> None:
    wanted = {"origin": "https://a.example", "access-control-request-method": "POST"}
    async with opened(loaded) as house, aiohttp.ClientSession() as session:
        reply = await session.options(f"http://{house.http}{CHAT}", headers=wanted)
        assert "access-control-allow-origin" not in reply.headers
    settings: dict[str, Any] = {"cors_origins": ("https://a.example",), "api_keys": (KEY,)}
    async with opened(loaded, **settings) as house, aiohttp.ClientSession() as session:
        reply = await session.options(f"http://{house.http}{CHAT}", headers=wanted)
        assert reply.headers["access-control-allow-origin"] == "https://a.example"
        refused = await session.post(f"http://{house.http}{CHAT}", headers=wanted)
        assert "x-should-retry" in refused.headers["access-control-expose-headers"]
        other = {**wanted, "origin": "https://b.example"}
        reply = await session.options(f"http://{house.http}{CHAT}", headers=other)
        assert "access-control-allow-origin" not in reply.headers


async def test_a_foreign_page_may_not_even_ask_where_there_are_no_keys(loaded: Loaded) -> None:
    """A page's script needs nobody's leave for a POST of plain text, only to read the answer."""
    page: dict[str, Any] = {"origin": "https://a.example"}
    data = json.dumps(body()).encode()

    async def status(house: House, **headers: Any) -> int:
        sent = await Connection.send(house.http, "POST", CHAT, data, **headers)
        return (await sent.reply()).status

    async with opened(loaded) as house:
        assert await status(house, **page, content_type="text/plain") == 400
        assert await status(house, origin="null") == 400
        assert not house.script.jobs
        assert await status(house) == 200
    for origins in (("https://a.example",), ("*",)):
        async with opened(loaded, cors_origins=origins) as house:
            assert await status(house, **page) == 200
    async with opened(loaded, api_keys=(KEY,)) as house:
        assert await status(house, **page, **bearer(KEY)) == 200, "whose key it is may say"


async def test_keys_take_turns_in_all_that_is_done_before_the_stages(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    salts: list[Hashable] = []
    acquire = Turns.acquire

    async def noted(turns: Turns, client: Hashable) -> None:
        salts.append(client)
        await acquire(turns, client)

    monkeypatch.setattr(Turns, "acquire", noted)
    buffer = io.BytesIO()
    Image.new("RGB", (64, 48)).save(buffer, "GIF")  # read by another process, as no PNG is
    url = "data:image/gif;base64," + base64.b64encode(buffer.getvalue()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]
    asked = body(messages=[{"role": "user", "content": content}], guided_regex="[a-z]*")
    asked["metadata"] = {str(i): [i] for i in range(3000)}  # a heavy body
    async with opened(loaded, api_keys=(KEY, OTHER)) as house:
        reply = await post(house.http, CHAT, asked, **bearer(KEY))
        assert reply.status == 200, reply.body
    assert len(salts) == 3, "body, picture's header, grammar"
    assert len(set(salts)) == 1
    assert salts[0], "the key's, not nobody's"


async def test_the_access_log_has_no_contents(
    loaded: Loaded, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with opened(loaded, api_keys=(KEY,)) as house:
        secret = {"role": "user", "content": "my secret"}
        await post(house.http, f"{CHAT}?q=hidden", body(messages=[secret]), **bearer(KEY))
    (line,) = [record for record in caplog.records if record.message == "access"]
    assert (vars(line)["status"], vars(line)["path"]) == (200, CHAT)
    everything = " ".join(str(vars(record)) for record in caplog.records)
    for hidden in ("my secret", KEY, "hidden"):
        assert hidden not in everything


REFUSED: list[dict[str, Any]] = [
    {"model": "my secret"},
    {"guided_regex": "(my secret"},
    {"messages": [{"role": "my secret", "content": ""}]},
    {"messages": [{"role": "user", "content": [{"type": "my secret"}]}]},
    {"tools": [], "tool_choice": {"type": "function", "function": {"name": "my secret"}}},
    {"seed": "my secret"},
]


@pytest.mark.parametrize("fields", REFUSED)
async def test_no_log_quotes_what_is_refused(
    loaded: Loaded, caplog: pytest.LogCaptureFixture, fields: dict[str, Any]
) -> None:
    """The client is told what of theirs is wrong; the log, which field and how."""
    caplog.set_level(logging.DEBUG, "gateway")
    async with opened(loaded) as house:
        reply = await post(house.http, CHAT, {**body(), **fields})
    assert reply.status == 400
    everything = " ".join(str(vars(record)) for record in caplog.records)
    assert "my secret" not in everything
    (param,) = fields.keys() - {"tools"}
    assert param in everything


async def test_grpc_calls_have_the_same_line(
    loaded: Loaded, caplog: pytest.LogCaptureFixture
) -> None:
    """Answered, refused, given up, and those that no stage hears of."""
    caplog.set_level(logging.INFO)
    pb = gateway_pb2
    mine = (("authorization", f"Bearer {KEY}"),)

    def lines() -> list[tuple[Any, ...]]:
        found = [vars(record) for record in caplog.records if record.message == "access"]
        assert all(line["method"] == "gRPC" and line["ms"] >= 0 for line in found)
        return [(line["path"].split("/")[-1], line["status"], line["key"]) for line in found]

    async def refused(call: Any) -> None:
        with pytest.raises(grpc.aio.AioRpcError):
            await call

    async with (
        opened(loaded, api_keys=(KEY,)) as house,
        grpc.aio.insecure_channel(house.grpc) as channel,
    ):
        stub: Any = gateway_pb2_grpc.GatewayStub(channel)
        secret = pb.ContentPart(text="my secret")
        chat = pb.ChatRequest(messages=[pb.Message(role=pb.ROLE_USER, parts=[secret])])
        assert [event async for event in stub.Chat(chat, metadata=mine)]
        await stub.ListModels(pb.ListModelsRequest(), metadata=mine)
        await stub.Tokenize(pb.TokenizeRequest(text="my secret"), metadata=mine)
        await refused(stub.Detokenize(pb.DetokenizeRequest(), metadata=mine))
        await refused(stub.ListModels(pb.ListModelsRequest()))
        await refused(over_grpc(channel, "sk-wrong"))
        house.script.hooks["decode.token"] = hang
        given_up = stub.Chat(chat, metadata=mine)
        await anext(aiter(given_up))
        given_up.cancel()
        await until(lambda: len(lines()) >= 7)
    digits = hashlib.sha256(KEY.encode()).hexdigest()[:8]
    assert lines() == [
        ("Chat", "OK", digits),
        ("ListModels", "OK", digits),
        ("Tokenize", "OK", digits),
        ("Detokenize", "INVALID_ARGUMENT", digits),
        ("ListModels", "UNAUTHENTICATED", "?"),
        ("Chat", "UNAUTHENTICATED", "?"),
        ("Chat", "CANCELLED", digits),
    ]
    everything = " ".join(str(vars(record)) for record in caplog.records)
    for hidden in ("my secret", KEY, "sk-wrong"):
        assert hidden not in everything
