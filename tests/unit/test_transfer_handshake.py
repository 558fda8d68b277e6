"""The probe: bounded, and choosy about what answers."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from epd.transfer.handshake import describe, parse, split_session

DESCRIPTOR = {"name": "h:1", "protocol": "tcp", "tcp_data_port": 16000, "timestamp": "now"}


def frame(body: bytes) -> bytes:
    return struct.pack("<Q", len(body)) + body


@asynccontextmanager
async def server(answer: bytes | None) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Answers each connection with `answer` (None: never) and notes what it was asked."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.read(100))
        if answer is None:
            await asyncio.sleep(3600)
        writer.write(answer or b"")
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"127.0.0.1:{listening.sockets[0].getsockname()[1]}", asked
    listening.close()


async def test_asks_for_the_descriptor_and_reads_the_transport() -> None:
    async with server(frame(b"\x01" + json.dumps(DESCRIPTOR).encode())) as (session, asked):
        assert (await describe(session, 1.0)).protocol == "tcp"
    assert asked == [frame(b"\x01{}")]


async def test_a_silent_peer_costs_the_timeout_and_no_more() -> None:
    async with server(None) as (session, _):
        start = asyncio.get_running_loop().time()
        with pytest.raises(TimeoutError):
            await describe(session, 0.1)
        assert asyncio.get_running_loop().time() - start < 1.0


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        frame(b"\x01{")[:-1],
        frame(b"\x01{"),
        frame(b"\x03{}"),
        frame(b"\x01[]"),
        frame(b"\x01{}"),
        struct.pack("<Q", 1 << 40),
        struct.pack("<Q", 0),
    ],
)
async def test_what_is_no_engine_is_refused(answer: bytes) -> None:
    async with server(answer) as (session, _):
        with pytest.raises((OSError, ValueError)):
            await describe(session, 1.0)


def test_digest_tells_engines_apart_and_ignores_the_time() -> None:
    def digest(**change: object) -> bytes:
        return parse(b"\x01" + json.dumps({**DESCRIPTOR, **change}).encode()).digest

    assert digest() == digest(timestamp="later")
    assert digest() != digest(tcp_data_port=16001)


@pytest.mark.parametrize("session", ["", "host", ":1", "host:", "host:x", "host:0", "host:70000"])
def test_malformed_sessions_are_refused(session: str) -> None:
    with pytest.raises(ValueError, match="not host:port"):
        split_session(session)


def test_sessions_may_be_ipv6() -> None:
    assert split_session("[::1]:15000") == ("::1", 15000)
