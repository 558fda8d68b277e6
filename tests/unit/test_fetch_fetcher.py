"""Fetching from a server in the test's own process: policy before any connection, caps, time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

import psutil
import pytest

from epd.config import FetchConfig
from epd.errors import EpdError, ErrorKind
from gateway.fetch import Fetcher, is_web_url, policy
from tests.waiting import a_moment, soon, until

BODY = b"not a picture, but bytes"


@dataclass
class Site:
    """A loopback server that answers each path with raw bytes; counts connections."""

    answers: dict[str, bytes] = field(default_factory=dict)
    hold: set[str] = field(default_factory=set)
    on: dict[str, bytes] = field(default_factory=dict)
    """Said again and again after the answer, as fast as it is taken."""
    requests: list[bytes] = field(default_factory=list)
    connections: int = 0
    port: int = 0
    open_now: int = 0
    most_open: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.requests.append(head)
            path = head.split()[1].decode()
            writer.write(self.answers.get(path, b"HTTP/1.1 404 Not Found\r\n\r\n"))
            while path in self.on:
                writer.write(self.on[path])
                await writer.drain()
            if path in self.hold:
                await reader.read()  # until the client leaves
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open_now -= 1
            writer.close()

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"


def ok(body: bytes, **headers: str) -> bytes:
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if "content_length" not in headers and "transfer_encoding" not in headers:
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join(["HTTP/1.1 200 OK", *lines, "", ""]).encode() + body


def redirect(location: str, status: int = 302) -> bytes:
    return f"HTTP/1.1 {status} X\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n".encode()


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    site = Site(answers={"/x.png": ok(BODY)})
    server = await asyncio.start_server(site.serve, "127.0.0.1", 0)
    site.port = server.sockets[0].getsockname()[1]
    yield site
    server.close()


Fetch = Callable[..., Awaitable[bytes]]


@pytest.fixture
async def fetch(site: Site) -> AsyncIterator[Fetch]:
    """``fetch(url, **settings)``: by default the site is listed and may be dialled."""
    made: list[Fetcher] = []

    async def get(url: str, **settings: Any) -> bytes:
        listed = {"mode": "allow-list", "hosts": (f"127.0.0.1:{site.port}",)}
        fetcher = Fetcher(FetchConfig(**{**listed, "allow_private": True, **settings}))
        made.append(fetcher)
        return await fetcher.fetch(url, "there")

    yield get
    for fetcher in made:
        fetcher.close()


async def refused(call: Awaitable[bytes], words: str, kind: str = "invalid_image_url") -> None:
    with pytest.raises(EpdError) as caught:
        await call
    assert words in caught.value.message
    assert caught.value.param == "there"
    assert caught.value.kind is ErrorKind(kind)
    assert caught.value.mapping.users_fault or kind == "overloaded"


async def test_a_listed_host_is_fetched(site: Site, fetch: Fetch) -> None:
    assert await fetch(site.url("/x.png")) == BODY
    assert site.connections == 1


async def test_off_is_the_default(site: Site) -> None:
    fetcher = Fetcher(FetchConfig())
    await refused(fetcher.fetch(site.url("/x.png"), "there"), "is off")
    fetcher.close()
    assert site.connections == 0


async def test_a_request_says_nothing_of_us(
    site: Site, fetch: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No proxy from the environment, no cookie of an earlier hop, no credential."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    first = b"HTTP/1.1 302 X\r\nset-cookie: a=b\r\nlocation: /x.png\r\ncontent-length: 0\r\n\r\n"
    site.answers["/first"] = first
    assert await fetch(site.url("/first")) == BODY
    names = {line.split(b":")[0].lower() for line in site.requests[1].split(b"\r\n")[1:] if line}
    assert names == {b"host", b"accept", b"accept-encoding", b"user-agent", b"connection"}


PRIVATE = ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "127.0.0.2"]


@pytest.mark.parametrize("host", PRIVATE)
async def test_public_mode_never_dials_an_address_that_is_not(
    site: Site, fetch: Fetch, host: str
) -> None:
    settings = {"mode": "public", "hosts": (), "allow_private": False, "ports": (site.port,)}
    await refused(fetch(site.url("/x.png", host), **settings), "not on the public internet")
    assert site.connections == 0


@pytest.mark.parametrize("host", ["2130706433", "127.1", "0x7f.1", "017700000001"])
async def test_odd_spellings_of_loopback_are_refused(site: Site, fetch: Fetch, host: str) -> None:
    await refused(fetch(site.url("/x.png", host), mode="public"), "a number")
    assert site.connections == 0


async def test_every_address_of_a_name_must_be_public(
    site: Site, fetch: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = [policy.look_up("8.8.8.8")[0], policy.look_up("127.0.0.1")[0]]
    monkeypatch.setattr(policy, "look_up", lambda host: mixed)
    settings = {"mode": "public", "allow_private": False, "ports": (site.port,)}
    await refused(fetch(site.url("/x.png", "rebind.example"), **settings), "public internet")
    assert site.connections == 0


async def test_a_name_is_resolved_once_and_dialled_there(
    site: Site, fetch: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name server that changes its answer after the check is never asked again."""
    asked: list[str] = []

    def once(host: str) -> list[Any]:
        asked.append(host)
        assert len(asked) == 1, "resolved twice"
        return [ip_address("127.0.0.1")]

    monkeypatch.setattr(policy, "look_up", once)

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("the system's resolver was asked")

    monkeypatch.setattr(socket, "getaddrinfo", never)
    url = site.url("/x.png", "pictures.example")
    assert await fetch(url, hosts=(f"*.example:{site.port}",)) == BODY
    assert asked == ["pictures.example"]
    assert f"Host: pictures.example:{site.port}\r\n".encode() in site.requests[0]


async def test_hosts_and_ports_that_are_not_listed(site: Site, fetch: Fetch) -> None:
    await refused(fetch(site.url("/x.png"), hosts=("example.com",)), "not on the list")
    await refused(fetch(site.url("/x.png"), hosts=("127.0.0.1",)), "not on the list")
    await refused(fetch(site.url("/x.png"), mode="public", hosts=()), f"from port {site.port}")
    assert site.connections == 0
    listed = {"hosts": ("127.0.0.1",), "ports": (site.port,)}
    assert await fetch(site.url("/x.png"), **listed) == BODY


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_followed(site: Site, fetch: Fetch, status: int) -> None:
    site.answers["/a"] = redirect("/b", status)
    site.answers["/b"] = redirect(site.url("/x.png"), status)
    assert await fetch(site.url("/a")) == BODY


async def test_each_redirect_is_checked(site: Site, fetch: Fetch) -> None:
    other = Site(answers={"/x.png": ok(BODY)})
    server = await asyncio.start_server(other.serve, "127.0.0.1", 0)
    other.port = server.sockets[0].getsockname()[1]
    for location, words in (
        (other.url("/x.png"), "not on the list"),
        (f"http://localhost:{site.port}/x.png", "not on the list"),
        ("file:///etc/hostname", "scheme file:"),
        ("http://127.1/", "a number"),
        ("/loop", "more than 3 times"),
    ):
        site.answers["/loop"] = redirect(location)
        await refused(fetch(site.url("/loop")), words)
    server.close()
    assert other.connections == 0


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
TROUBLE = {
    "403": (b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n", "status 403"),
    "404 with HTML": (b"HTTP/1.1 404 X\r\ncontent-length: 6\r\n\r\n<html>", "status 404"),
    "500": (b"HTTP/1.1 500 X\r\ncontent-length: 0\r\n\r\n", "status 500"),
    "304": (b"HTTP/1.1 304 X\r\n\r\n", "status 304"),
    "partial": (b"HTTP/1.1 206 X\r\ncontent-length: 1\r\n\r\nx", "status 206"),
    "no location": (b"HTTP/1.1 302 X\r\ncontent-length: 0\r\n\r\n", "status 302"),
    "empty": (ok(b""), "empty body"),
    "cut short": (ok(b"abc", content_length="9"), "cut the body short"),
    "gzip": (ok(b"\x1f\x8b", content_encoding="gzip"), "compressed body"),
    "no HTTP": (b"SSH-2.0-OpenSSH_9.6\r\n", "proper HTTP"),
    "nothing": (b"", "broke the connection"),
    "two lengths": (ok(b"abc", content_length="3\r\ncontent-length: 4"), "proper HTTP"),
    "negative length": (ok(b"abc", content_length="-1"), "proper HTTP"),
    "huge header": (ok(b"abc", x="a" * 100_000), "proper HTTP"),
    "many headers": (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 200 + b"\r\n", "proper HTTP"),
    "nothing to say": (b"HTTP/1.1 204 X\r\n\r\n", "status 204"),
    "many trailers": (CHUNKED + b"1\r\nx\r\n0\r\n" + b"x: y\r\n" * 200 + b"\r\n", "proper HTTP"),
    "a chunk of no size": (CHUNKED + b"x\r\n", "proper HTTP"),
    "a coding on the way": (ok(b"\x1f\x8b", transfer_encoding="gzip, chunked"), ""),
    "length and chunks": (
        ok(b"1\r\nx\r\n0\r\n\r\n", content_length="1", transfer_encoding="chunked"),
        "",
    ),
}


@pytest.mark.parametrize("name", TROUBLE)
async def test_trouble_at_the_other_end_is_named(site: Site, fetch: Fetch, name: str) -> None:
    site.answers["/bad"], words = TROUBLE[name]
    await refused(fetch(site.url("/bad")), words)


async def test_no_one_there(fetch: Fetch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        url = f"http://127.0.0.1:{port}/"
        await refused(fetch(url, hosts=(f"127.0.0.1:{port}",)), "can't be connected to")


async def test_a_name_that_does_not_exist(fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(host: str) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(policy, "look_up", fails)
    await refused(fetch("http://nowhere.example/", mode="public"), "can't be resolved")


@pytest.mark.parametrize("chunked", [True, False])
async def test_the_cap_holds_while_reading(site: Site, fetch: Fetch, chunked: bool) -> None:
    """Declared or not, no more than the cap (and what one read holds) is ever kept."""
    if chunked:
        chunk = b"10000\r\n" + bytes(0x10000) + b"\r\n"
        site.answers["/big"] = ok(chunk * 64, transfer_encoding="chunked")
    else:
        site.answers["/big"] = ok(b"", content_length=str(1 << 40))
    site.hold.add("/big")
    call = fetch(site.url("/big"), max_bytes=100_000)
    await refused(call, "more than 100000 bytes", "image_too_large")


ENDLESS = {
    "headers": (b"HTTP/1.1 200 OK\r\n", b"x: y\r\n"),
    "one header": (b"HTTP/1.1 200 OK\r\nx: ", b"y" * 4096),
    "a first line": (b"HTTP/1.1 200 ", b"y" * 4096),
    "interim answers": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
    "early hints": (b"", b"HTTP/1.1 103 Early Hints\r\nlink: <a>\r\n\r\n" * 100),
    "empty lines": (b"", b"\r\n" * 1000),
    "trailers": (CHUNKED + b"1\r\nx\r\n0\r\n", b"x: y\r\n"),
    "the name of a chunk": (CHUNKED + b"1;", b"x" * 4096),
    "the size of a chunk": (CHUNKED, b"0" * 4096),
}


@pytest.mark.parametrize("name", ENDLESS)
async def test_what_has_no_end_ends(site: Site, fetch: Fetch, name: str) -> None:
    """By a bound or by the deadline, in little memory."""
    site.answers["/on"], site.on["/on"] = ENDLESS[name]
    before = psutil.Process().memory_info().rss
    with soon(30, instead_of="the server"):
        await refused(fetch(site.url("/on"), total_s=1), "the image")
    assert psutil.Process().memory_info().rss - before < 32 << 20
    await until(lambda: not site.open_now)


async def test_one_deadline_for_everything(site: Site, fetch: Fetch) -> None:
    """A server that says nothing, and one that drips: neither resets the clock."""
    site.answers["/silent"] = b""
    site.answers["/drip"] = ok(b"a", content_length="100")
    site.hold |= {"/silent", "/drip"}
    for path in ("/silent", "/drip"):
        with soon(20, instead_of="the server"):
            await refused(fetch(site.url(path), total_s=0.3), "within 0.3 s")


async def test_one_slow_host_leaves_places_to_others(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.answers["/silent"] = b""
    site.hold.add("/silent")
    monkeypatch.setattr(policy, "look_up", lambda host: [ip_address("127.0.0.1")])
    config = FetchConfig(
        mode="public",
        ports=(site.port,),
        allow_private=True,
        concurrency=3,
        per_host=2,
        total_s=4.0,
    )
    fetcher = Fetcher(config)
    slow = [
        asyncio.create_task(fetcher.fetch(site.url("/silent", "slow.example"), "there"))
        for _ in range(8)
    ]
    await until(lambda: site.open_now >= 2)
    await a_moment(0.1)
    assert site.open_now == 2
    assert await fetcher.fetch(site.url("/x.png", "quick.example"), "there") == BODY
    assert not any(task.done() for task in slow), "it waited for the slow ones"
    results = await asyncio.gather(*slow, return_exceptions=True)
    kinds = sorted(str(error.kind) for error in results if isinstance(error, EpdError))
    # All have one deadline: a place that is freed by it comes too late for those who wait.
    assert kinds == ["invalid_image_url"] * 2 + ["overloaded"] * 6
    assert site.most_open == 3
    assert not fetcher._hosts, "places of hosts that nobody asks are forgotten"
    fetcher.close()


async def test_a_place_at_the_last_moment_is_no_fault_of_the_images_server(site: Site) -> None:
    site.answers["/silent"] = b""
    site.hold.add("/silent")
    listed = (f"127.0.0.1:{site.port}",)
    config = FetchConfig(
        mode="allow-list", hosts=listed, allow_private=True, concurrency=1, total_s=4.0
    )
    fetcher = Fetcher(config)
    first = asyncio.create_task(fetcher.fetch(site.url("/silent"), "there"))
    await until(lambda: site.open_now)
    second = asyncio.create_task(fetcher.fetch(site.url("/silent"), "there"))
    await asyncio.sleep(2.5)  # more than half of its time
    first.cancel()  # its place goes to the second, with 1.5 s to go: less than half
    await refused(second, "too many images", "overloaded")
    assert site.connections == 2
    fetcher.close()


async def test_leaving_closes_the_connection(site: Site) -> None:
    site.answers["/silent"] = b""
    site.hold.add("/silent")
    listed = (f"127.0.0.1:{site.port}",)
    fetcher = Fetcher(FetchConfig(mode="allow-list", hosts=listed, allow_private=True))
    task = asyncio.create_task(fetcher.fetch(site.url("/silent"), "there"))
    await until(lambda: site.open_now)
    task.cancel()
    await asyncio.wait([task])
    await until(lambda: not site.open_now)
    fetcher.close()


def test_what_looks_like_a_web_url() -> None:
    assert is_web_url("http://a")
    assert is_web_url(" HTTPS:x")
    assert not is_web_url("data:image/png;base64,http://")
    assert not is_web_url("httpx://a")
