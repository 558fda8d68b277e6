"""What a client may hold of the gateway, and for how long: heads, bodies, bytes, streams."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.checkpoint import Loaded
from gateway.http_server import HttpServer
from tests.e2e.fake_stages import hang
from tests.e2e.gateway_house import CHAT, House, opened, raw
from tests.e2e.http_client import Connection
from tests.waiting import LIMIT_S, promised, soon, until

POST = f"POST {CHAT} HTTP/1.1\r\nhost: epd\r\ncontent-type: application/json\r\n".encode()


def server(house: House) -> HttpServer:
    found = house.gateway._http
    assert found is not None
    return found


async def connect(house: House) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = house.http.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def drip(writer: asyncio.StreamWriter, data: bytes, every: float = 0.05) -> None:
    """`data` again and again, until the connection breaks."""
    try:
        while not writer.is_closing():
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(every)
    except OSError:
        pass


@asynccontextmanager
async def dripping(house: House, start: bytes, data: bytes) -> AsyncIterator[asyncio.StreamReader]:
    reader, writer = await connect(house)
    writer.write(start)
    task = asyncio.create_task(drip(writer, data))
    try:
        yield reader
    finally:
        task.cancel()
        writer.close()


async def until_end(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the connection is closed or cut."""
    read = b""
    try:
        while chunk := await reader.read(1 << 16):
            read += chunk
    except ConnectionResetError:
        pass
    return read


async def answer(reader: asyncio.StreamReader) -> tuple[int, Any]:
    """Status and body of one answer, and then the connection's end."""
    async with asyncio.timeout(LIMIT_S):
        read = await until_end(reader)
    head, _, body = read.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


# --- heads and bodies ------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"x", b"x-more: 1\r\n"])
async def test_a_head_that_trickles_is_408(loaded: Loaded, data: bytes) -> None:
    async with opened(loaded, head_s=0.5) as house, dripping(house, POST, data) as reader:
        with soon(promised(8), instead_of="head_s as it is by default"):
            status, body = await answer(reader)
        assert (status, body["error"]["code"]) == (408, "request_timeout")
        await until(lambda: not server(house).connections)


@pytest.mark.parametrize("data", [b"", b"\r\n"])
async def test_a_connection_without_a_request_is_closed(loaded: Loaded, data: bytes) -> None:
    async with opened(loaded, head_s=0.5) as house:
        reader, writer = await connect(house)
        task = asyncio.create_task(drip(writer, data))
        with soon(promised(8), instead_of="head_s as it is by default"):
            await until_end(reader)
        task.cancel()
        writer.close()
        await until(lambda: not server(house).connections)


@pytest.mark.parametrize("data", [b"x" * 4096, b"x-more: 1\r\n" * 300])
async def test_a_head_without_end_is_431(loaded: Loaded, data: bytes) -> None:
    async with opened(loaded) as house, dripping(house, POST, data) as reader:
        status, body = await answer(reader)
        assert (status, body["error"]["code"]) == (431, "request_too_large")


async def sent(house: House, data: bytes) -> tuple[int, Any]:
    """The answer to a request that wants its connection closed."""
    reader, writer = await connect(house)
    try:
        writer.write(data)
        return await answer(reader)
    finally:
        writer.close()


def asked(**body: Any) -> bytes:
    messages = [{"role": "user", "content": "Hello"}]
    return json.dumps({"model": "demo", "messages": messages, **body}).encode()


@pytest.mark.parametrize("lines", [b"a: " + b"b" * 70_000 + b"\r\n", b"a: bcdefgh\r\n" * 9000])
async def test_a_head_that_comes_in_one_piece_is_bounded_too(loaded: Loaded, lines: bytes) -> None:
    body = asked()
    more = lines + b"content-length: %d\r\n\r\n" % len(body)
    async with opened(loaded, head_bytes=64 << 10) as house:
        status, found = await sent(house, POST + more + body + POST + b"\r\n")
        assert (status, found["error"]["code"]) == (431, "request_too_large")
        assert house.journal == []


async def test_who_asks_whether_to_send_too_much_is_told_at_once(loaded: Loaded) -> None:
    head = b"connection: close\r\nexpect: 100-continue\r\ncontent-length: 1000000000\r\n\r\n"
    async with opened(loaded) as house:
        status, found = await sent(house, POST + head)
        assert (status, found["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize("name", [b"Upgrade", b"upgrade", b"UPGRADE"])
@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
async def test_offers_of_other_protocols_are_ignored(
    loaded: Loaded, name: bytes, protocol: bytes
) -> None:
    """Java's HttpClient offers h2c with its first request, and means it to be answered."""
    body = asked(user="\r\nUpgrade: not a header")
    offer = b"Connection: Upgrade, close\r\n" + name + b": " + protocol + b"\r\n"
    length = b"content-length: %d\r\n\r\n" % len(body)
    async with opened(loaded) as house:
        status, found = await sent(house, POST + offer + length + body)
        assert status == 200
        assert found["usage"]["completion_tokens"] > 0


async def test_a_compressed_body_is_refused_by_name(loaded: Loaded) -> None:
    body = gzip.compress(asked())
    head = b"connection: close\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with opened(loaded) as house:
        status, found = await sent(house, POST + head + body)
        assert status == 400
        assert "content-encoding 'gzip' is not supported" in found["error"]["message"]


async def test_small_values_by_the_million_are_not_parsed(loaded: Loaded) -> None:
    """A body of 20 MB of them would be a gigabyte of objects."""
    body = b'{"model":"demo","messages":[' + b"[]," * 1_100_000 + b"[]]}"
    head = b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with opened(loaded, {"max_body_bytes": 8 << 20}) as house:
        status, found = await sent(house, POST + head + body)
        assert status == 400
        assert "more than 1000000 values" in found["error"]["message"]


async def test_trailers_without_end_are_cut_off(loaded: Loaded) -> None:
    start = POST + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"
    async with opened(loaded) as house, dripping(house, start, b"a: b\r\n" * 500) as reader:
        assert (await answer(reader))[0] == 431
        await until(lambda: not server(house).connections)


@pytest.mark.parametrize(
    ("head", "data"),
    [
        (b"content-length: 100000\r\n\r\n", b" "),
        (b"transfer-encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        (b"content-length: 100000\r\n\r\n", b""),
    ],
)
async def test_a_body_that_trickles_is_408(loaded: Loaded, head: bytes, data: bytes) -> None:
    start = POST + b"connection: close\r\n" + head
    async with opened(loaded, body_s=0.5) as house, dripping(house, start, data) as reader:
        with soon(30, instead_of="body_s as it is by default"):
            status, body = await answer(reader)
        assert (status, body["error"]["code"]) == (408, "request_timeout")
        assert house.journal == []


async def test_the_body_of_a_refused_request_may_not_trickle_for_ever(loaded: Loaded) -> None:
    start = POST.replace(b"/chat/", b"/nothing/") + b"content-length: 100000\r\n\r\n"
    async with opened(loaded) as house, dripping(house, start, b" ") as reader:
        assert (await answer(reader))[0] == 404
        await until(lambda: not server(house).connections)


async def test_requests_on_one_connection_each_have_their_time(loaded: Loaded) -> None:
    async with opened(loaded, head_s=3.0) as house:
        reader, writer = await connect(house)
        for _ in range(4):
            writer.write(b"GET /health HTTP/1.1\r\n")
            await asyncio.sleep(0.8)  # together more than one may take, each far less
            writer.write(b"host: epd\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert b" 200 " in head
            await reader.readexactly(len(b'{"status":"ok"}'))
        writer.close()


# --- how many, how much ----------------------------------------------------------------------


async def test_one_connection_too_many_is_503(loaded: Loaded) -> None:
    async with opened(loaded, max_connections=3) as house:
        held = [await connect(house) for _ in range(3)]
        reader, writer = await connect(house)
        read = await reader.read()
        assert read.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in read
        assert json.loads(read.partition(b"\r\n\r\n")[2])["error"]["code"] == "overloaded"
        for _, open_writer in (*held, (reader, writer)):
            open_writer.close()
        await until(lambda: not server(house).connections)
        assert (await house.chat()).status == 200


@pytest.mark.parametrize("chunked", [False, True])
async def test_bytes_of_all_requests_in_flight_are_bounded(loaded: Loaded, chunked: bool) -> None:
    async with opened(loaded, {"max_inflight_mib": 1}) as house:
        house.script.hooks["decode.token"] = hang
        large = raw(stream=True, user="x" * 600_000)
        first = await Connection.send(house.http, "POST", CHAT, large)
        await first.head()
        assert house.gateway.service.budget.used == len(large)
        if chunked:
            reader, writer = await connect(house)
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(large), large)
            writer.write(POST + b"transfer-encoding: chunked\r\n\r\n" + body)
            head = await reader.readuntil(b"\r\n\r\n")
            writer.close()
        else:
            reply = await (await Connection.send(house.http, "POST", CHAT, large)).reply()
            assert reply.json()["error"]["code"] == "overloaded"
            head = b" %d retry-after: %b" % (reply.status, reply.headers["retry-after"].encode())
        assert b" 429 " in head
        assert b"retry-after: 1" in head
        assert house.gateway.service.budget.used == len(large)
        first.close()
        await house.settled()
        house.script.hooks.clear()
        reply = await (await Connection.send(house.http, "POST", CHAT, large)).reply()
        assert reply.status == 200
