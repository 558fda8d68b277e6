"""HTTP as it comes over a bare socket: old clients, pipelines, halves of connections, tricks."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct

import pytest

from tests.e2e.fake_stages import Call
from tests.e2e.gateway_house import CHAT, House, raw
from tests.e2e.test_gateway_bounds import connect, until_end
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.timeout(60)


def post(data: bytes, version: str = "1.1", *lines: str) -> bytes:
    head = [f"POST {CHAT} HTTP/{version}", "host: epd", f"content-length: {len(data)}", *lines]
    return "\r\n".join([*head, "", ""]).encode() + data


async def said(house: House, data: bytes) -> bytes:
    """All that comes back until the connection ends."""
    reader, writer = await connect(house)
    writer.write(data)
    async with asyncio.timeout(LIMIT_S):
        read = await until_end(reader)
    writer.close()
    return read


@pytest.mark.parametrize("stream", [False, True])
async def test_http_1_0_knows_no_chunks(house: House, stream: bool) -> None:
    head, _, body = (await said(house, post(raw(stream=stream), "1.0"))).partition(b"\r\n\r\n")
    assert b" 200 " in head
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    if stream:
        events = body.split(b"\n\n")
        assert all(event.startswith(b"data: ") for event in events if event)
        assert body.endswith(b"data: [DONE]\n\n")
    else:
        assert json.loads(body)["choices"]


async def test_pipelined_requests_are_answered_in_order(house: House) -> None:
    last = b"GET /health HTTP/1.1\r\nhost: epd\r\nconnection: close\r\n\r\n"
    read = await said(house, post(raw(stream=True)) + post(raw()) + post(raw(stream=True)) + last)
    assert read.count(b"HTTP/1.1 200 OK") == 4
    assert read.count(b"data: [DONE]") == 2
    assert read.endswith(b'{"status":"ok"}')


async def test_chunks_with_extensions_and_trailers(house: House) -> None:
    data = raw()
    head = post(b"", "1.1", "transfer-encoding: chunked", "connection: close")
    head = head.replace(b"content-length: 0\r\n", b"")
    read = await said(house, head + b"%x;a=b\r\n%b\r\n0\r\nx-a: 1\r\n\r\n" % (len(data), data))
    assert b" 200 OK" in read


@pytest.mark.parametrize(
    "lines",
    [
        ("transfer-encoding: gzip, chunked",),
        ("transfer-encoding: gzip", "transfer-encoding: chunked"),
        ("Transfer-Encoding: X, Chunked",),
        ("transfer-encoding: chunked", "content-encoding: identity", "content-encoding: gzip"),
    ],
)
async def test_what_was_done_to_a_body_on_its_way_is_not_undone(
    house: House, lines: tuple[str, ...]
) -> None:
    """It is refused by name, and where it ends is known: the next request has its answer."""
    head = [f"POST {CHAT} HTTP/1.1", "host: epd", *lines, "", ""]
    coded = "\r\n".join(head).encode() + b"2\r\n\x1f\x8b\r\n0\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nhost: epd\r\nconnection: close\r\n\r\n"
    read = await said(house, coded + last)
    assert re.findall(rb"HTTP/1.1 (\d+)", read) == [b"400", b"200"]
    assert b"-encoding '" in read
    assert b"is not supported; send the body as it is" in read
    assert b'"type":"invalid_request_error"' in read
    assert read.endswith(b'{"status":"ok"}')
    assert house.journal == []


@pytest.mark.parametrize("coding", ["gzip", "Chunked, gzip", "identity"])
async def test_a_coding_that_hides_where_the_body_ends_is_named(house: House, coding: str) -> None:
    """Behind it nothing can be read: the connection ends."""
    head = f"POST {CHAT} HTTP/1.1\r\nhost: epd\r\nTransfer-Encoding: {coding}\r\n\r\n"
    read = await said(house, head.encode() + b"\x1f\x8b")
    assert re.findall(rb"HTTP/1.1 (\d+)", read) == [b"400"]
    assert b"transfer-encoding is not supported; send the body as it is, with a content-" in read
    assert b"or with transfer-encoding: chunked" in read
    other = await said(house, b"POST / HTTP/1.1\r\ncontent-length : 5\r\n\r\nabcde")
    assert b"no HTTP request that can be understood" in other


@pytest.mark.parametrize("line", ["Transfer-Encoding: Chunked", "content-encoding: Identity"])
async def test_a_body_as_it_is_may_be_called_so(house: House, line: str) -> None:
    data = raw()
    head = post(b"", "1.1", "connection: close", line)
    if "Chunked" in line:
        head = head.replace(b"content-length: 0\r\n", b"")
        data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)
    else:
        head = head.replace(b"length: 0", b"length: %d" % len(data))
    assert b" 200 OK" in await said(house, head + data)


SMUGGLED = b"GET /v1/models HTTP/1.1\r\nhost: epd\r\n\r\n"
TRICKS = {
    "both lengths": b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "two lengths": b"content-length: 5\r\ncontent-length: 6\r\n\r\nabcdef",
    "a list of lengths": b"content-length: 5, 5\r\n\r\nabcde",
    "a length below zero": b"content-length: -5\r\n\r\n",
    "another coding": b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "a chunk beyond all numbers": b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
    "a chunk below zero": b"transfer-encoding: chunked\r\n\r\n-1\r\n",
    "a null byte": b"a: \0b\r\n\r\n",
    "a name with a blank": b"content-length : 5\r\n\r\nabcde",
}


@pytest.mark.parametrize("name", TRICKS)
async def test_what_two_readers_could_read_differently(house: House, name: str) -> None:
    """One answer, a refusal, and the connection's end: nothing behind it is a request."""
    read = await said(house, b"POST /tokenize HTTP/1.1\r\nhost: epd\r\n" + TRICKS[name])
    assert read.startswith(b"HTTP/1.1 400 ")
    assert read.count(b"HTTP/1.1 ") == 1
    assert json.loads(read.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "line", ["CONNECT a:1 HTTP/1.1", "BREW / HTTP/1.1", "PRI * HTTP/2.0", "GET a:b HTTP/1.1"]
)
async def test_what_is_no_request_of_ours_is_told_so(house: House, line: str) -> None:
    read = await said(house, f"{line}\r\nhost: epd\r\n\r\n".encode())
    assert read.startswith(b"HTTP/1.1 400 ")
    assert b"x-request-id: req-" in read


@pytest.mark.parametrize("how", ["half", "reset"])
async def test_who_ends_a_connection_has_left(house: House, how: str) -> None:
    """Also by half: as with nginx, it means that nobody reads any more."""
    made = [0]

    async def slow(call: Call) -> None:
        made[0] = call.token
        await asyncio.sleep(0.02)

    house.script.output = [300 + at % 50 for at in range(500)]
    house.script.hooks["decode.token"] = slow
    reader, writer = await connect(house)
    writer.write(post(raw(stream=True, max_tokens=600)))
    await reader.readuntil(b"data: ")
    if how == "half":
        writer.write_eof()
    else:
        peer = writer.get_extra_info("socket")
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    await house.settled()
    assert made[0] < 400
    writer.close()
