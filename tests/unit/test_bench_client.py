"""One request: its times and its errors, against a script on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from epd.bench.client import HttpTransport, open_session, send
from epd.bench.record import Record
from epd.bench.scripted import build
from tests.unit.bench_script import (
    DONE,
    ROLE,
    STOP,
    At,
    Script,
    answer,
    event,
    record,
    refused,
    token,
    usage,
)  # fmt: skip
from tests.unit.virtual_time import run


def ask(steps: Sequence[At], timeout_s: float = 60.0) -> Record:
    async def main() -> Record:
        found = record(at=asyncio.get_running_loop().time())
        await send(Script(lambda _: steps), b"{}", found, timeout_s)
        return found

    return run(main())


def test_times_are_the_scripts() -> None:
    found = ask(answer(first_s=2.0, gap_s=0.5, tokens=5))
    assert found.ok, found.detail
    assert found.ttft == pytest.approx(2.0)
    assert found.tpot == pytest.approx(0.5)
    assert found.gaps == pytest.approx([0.5] * 4)
    assert found.latency == pytest.approx(4.0)
    assert (found.prompt_tokens, found.output_tokens) == (7, 5)


def test_tokens_count_as_the_server_counts_them() -> None:
    """Three tokens in two events: per token, time is shared; a reader sees one gap."""
    found = ask(
        [At(1.0, token("a")), At(2.0, token("bc")), At(2.0, STOP + usage(9, 3, cached=4) + DONE)]
    )
    assert found.tpot == pytest.approx(0.5)
    assert found.gaps == pytest.approx([1.0])
    assert found.cached_tokens == 4


def test_an_event_cut_in_two_counts_when_it_is_whole() -> None:
    whole = token("a")
    found = ask([At(1.0, whole[:9]), At(3.0, whole[9:] + STOP + DONE)])
    assert found.arrivals == pytest.approx([found.sent + 3.0])


def test_tokens_without_text_count_where_logprobs_show_them() -> None:
    bare = event(choices=[{"index": 0, "delta": {}, "logprobs": {"content": [{"token": "\xc3"}]}}])
    found = ask([At(0.0, ROLE), At(1.0, bare), At(2.0, STOP + DONE)])
    assert found.ttft == pytest.approx(1.0)


def test_an_answer_whose_tokens_make_no_text_ends_with_its_end() -> None:
    found = ask([At(0.0, ROLE), At(1.5, STOP + usage(4, 1) + DONE)])
    assert found.ok
    assert found.ttft == pytest.approx(1.5)
    assert found.tpot is None


@pytest.mark.parametrize(
    ("steps", "kind"),
    [
        (refused(503), "http_503"),
        (refused(429), "http_429"),
        ([At(0.0, OSError("reset"))], "connection_lost"),
        ([At(0.0, token("a")), At(99.0, DONE)], "timeout"),
        ([At(0.0, token("a"))], "truncated"),
        ([At(0.0, token("a") + DONE[:5])], "truncated"),
        ([At(0.0, ROLE + STOP + DONE)], "empty"),
        ([At(0.0, token("a")), At(1.0, event(error={"message": "lost"}))], "stream_error"),
        ([At(0.0, b"data: {nonsense\n\n")], "bad_event"),
        ([At(0.0, b"data: null\n\n")], "bad_event"),
        ([At(0.0, event(choices=5))], "bad_event"),
        ([At(0.0, event(choices=[None]))], "bad_event"),
        ([At(0.0, event(choices=[{"delta": "text"}]))], "bad_event"),
        ([At(0.0, token("a") + event(usage=[3]))], "bad_event"),
        ([At(0.0, token("a") + event(timeline={"phases": [{"name": "x"}]}))], "bad_event"),
    ],
)
def test_errors_by_kind(steps: Sequence[At], kind: str) -> None:
    found = ask(steps)
    assert found.error == kind
    assert found.detail
    assert found.ended >= found.sent


async def test_over_real_http() -> None:
    """Bytes, headers and status through aiohttp; nothing here depends on time."""
    from aiohttp.test_utils import TestServer

    async with (
        TestServer(build(count=40, first_s=0.0, gap_s=0.0)) as server,
        open_session(9) as http,
    ):
        found, lost = record(), record()
        await send(HttpTransport(str(server.make_url("/v1")), http), b"{}", found, 30.0)
        await send(HttpTransport(str(server.make_url("/none")), http), b"{}", lost, 30.0)
    assert found.ok, found.detail
    assert (len(found.arrivals), found.output_tokens) == (40, 40)
    assert lost.error == "http_404"


DROPPED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nKeep-Alive: timeout=5\r\n\r\n"
    b"%x\r\n%s\r\n0\r\n\r\n"
)


async def test_a_connection_of_its_own_where_a_server_drops_those_it_promised_to_keep() -> None:
    """As llama.cpp's server does after a stream."""
    events = token("a") + STOP + usage(7, 1) + DONE
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(DROPPED % (len(events), events))
        await writer.drain()
        writer.close()

    async with (
        await asyncio.start_server(serve, "127.0.0.1", 0) as server,
        open_session(9, keep=False) as http,
    ):
        port = server.sockets[0].getsockname()[1]
        transport = HttpTransport(f"http://127.0.0.1:{port}/v1", http)
        for _ in range(3):
            found = record()
            await send(transport, b"{}", found, 30.0)
            assert found.ok, found.detail
    assert connections == 3


async def test_nobody_listens() -> None:
    async with open_session(5) as http:
        found = record()
        await send(HttpTransport("http://127.0.0.1:1/v1", http), b"{}", found, 10.0)
    assert found.error == "connect"
