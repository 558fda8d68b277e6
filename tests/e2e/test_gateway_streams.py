"""Streams that are silent, late, or that nobody reads."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import pytest

from epd.errors import ErrorKind
from epd.jobs import Stage
from gateway.checkpoint import Loaded
from tests.e2e.fake_stages import Call, fail
from tests.e2e.gateway_house import CHAT, long_answer, opened, raw
from tests.e2e.http_client import Connection
from tests.e2e.test_gateway_bounds import POST, server
from tests.waiting import LIMIT_S, promised, soon, until


async def test_a_silent_stream_says_ping(loaded: Loaded) -> None:
    async with opened(loaded, ping_s=0.2) as house:
        go = asyncio.Event()

        async def wait(call: Call) -> None:
            if call.token == 3:
                await go.wait()

        house.script.hooks["decode.token"] = wait
        connection = await Connection.send(house.http, "POST", CHAT, raw(stream=True))
        await connection.head()
        seen = b""
        async with asyncio.timeout(LIMIT_S):
            async for chunk in connection._chunks():
                seen += chunk
                if seen.count(b": ping\n\n") == 3:
                    go.set()
        assert seen.count(b": ping\n\n") >= 3
        events = [event for event in seen.split(b"\n\n") if not event.startswith(b":")]
        assert all(event.startswith(b"data: ") for event in events if event)
        assert seen.endswith(b"data: [DONE]\n\n")


async def test_no_pings_where_they_are_off(loaded: Loaded) -> None:
    async with opened(loaded, ping_s=0) as house:

        async def wait(call: Call) -> None:
            await asyncio.sleep(0.3)

        house.script.hooks["decode.token"] = wait
        reply = await house.chat(stream=True)
        assert b"ping" not in reply.body
        assert reply.body.endswith(b"[DONE]\n\n")


@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
@pytest.mark.parametrize("point", ["prefill.job", "prefill.first"])
async def test_a_stream_that_begins_late_begins_with_pings(
    loaded: Loaded, point: str, path: str
) -> None:
    """Once a sign of life was sent, a fault can only be an event."""

    async def late(call: Call) -> None:
        await asyncio.sleep(1)
        await fail(ErrorKind.CHECKSUM_MISMATCH)(call)

    asked = raw(stream=True)
    if path != CHAT:
        asked = json.dumps({"model": "demo", "input": "hi", "stream": True}).encode()
    async with opened(loaded, ping_s=0.1) as house:
        house.script.hooks[point] = late
        reply = await (await Connection.send(house.http, "POST", path, asked)).reply()
        assert reply.status == 200
        assert reply.body.startswith(b": ping\n\n: ping\n\n")
        assert reply.body.count(b"checksum_mismatch") == 1
        assert reply.body.endswith(b"[DONE]\n\n") is (path == CHAT)


@pytest.mark.parametrize(
    ("kind", "level"),
    [(ErrorKind.CONTEXT_LENGTH_EXCEEDED, "INFO"), (ErrorKind.CHECKSUM_MISMATCH, "WARNING")],
)
async def test_what_ends_a_begun_stream_is_a_warning_if_it_is_ours(
    loaded: Loaded, caplog: pytest.LogCaptureFixture, kind: ErrorKind, level: str
) -> None:
    caplog.set_level("INFO")
    async with opened(loaded) as house:
        house.script.hooks["decode.token"] = fail(kind)
        assert str(kind) in str(await house.stream())
    (line,) = [one for one in caplog.records if one.getMessage().startswith("stream ends with")]
    assert line.levelname == level


async def test_a_reader_that_never_reads_is_cut_off(loaded: Loaded) -> None:
    """Memory is bounded, decode is held back, and its place is free in the end."""
    async with opened(loaded, slow_reader_s=1.0) as house:
        made = long_answer(house)
        host, _, port = house.http.rpartition(":")
        peer = socket.create_connection((host, int(port)), 5)
        asked = raw(stream=True, logprobs=True, top_logprobs=20, max_tokens=900)
        peer.sendall(POST + b"content-length: %d\r\n\r\n" % len(asked) + asked)
        started = time.monotonic()
        await until(lambda: house.gateway.service.inflight)
        with soon(promised(20), instead_of="slow_reader_s as it is by default"):
            await until(lambda: not house.gateway.service.inflight)
            await until(lambda: not server(house).connections)
        assert time.monotonic() - started >= 1.0
        assert 0 < made[0] < len(house.script.output) * 0.9
        await house.settled()
        peer.close()


async def test_a_reader_that_reads_slowly_is_not(loaded: Loaded) -> None:
    async with opened(loaded, slow_reader_s=2.0) as house:
        house.script.output = [400 + i % 50 for i in range(3_000)]
        asked = raw(stream=True, logprobs=True, max_tokens=900)
        connection = await Connection.send(house.http, "POST", CHAT, asked, buffer=1 << 10)
        await connection.head()
        events = 0
        async for _ in connection.events():
            events += 1
            if events % 200 == 0:
                await asyncio.sleep(0.2)  # 15 times: longer than a stall may be
        await until(lambda: not server(house).connections)


async def test_an_answer_that_nobody_fetches_is_cut_off(loaded: Loaded) -> None:
    """A whole answer, larger than what the kernel takes."""
    async with opened(loaded, {"default_max_tokens": 4096}, slow_reader_s=0.5) as house:
        peer = socket.socket()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = house.http.split(":")
        peer.connect((host, int(port)))
        house.script.output = [400 + i % 50 for i in range(6_000)]
        house.script.tokens_per_message = 64
        house.script.alternatives = 20
        asked = raw(logprobs=True, top_logprobs=20, max_tokens=900)
        peer.sendall(POST + b"content-length: %d\r\n\r\n" % len(asked) + asked)
        await until(lambda: house.script.jobs_of(Stage.DECODE))
        with soon(promised(20), instead_of="slow_reader_s as it is by default"):
            await until(lambda: not house.gateway.service.inflight)
            await until(lambda: not server(house).connections)
        peer.close()


async def test_tokens_that_come_together_are_one_event(loaded: Loaded) -> None:
    async with opened(loaded) as house:
        single = await house.stream()
        house.script.tokens_per_message = 9
        joined = await house.stream()
        assert len(joined) < len(single)
        text = ["".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1])
                for events in (single, joined)]  # fmt: skip
        assert text[0] == text[1]
