"""Fetching one picture: dialling, redirects, caps, one deadline over all of it.

What goes wrong at the other end is the caller's 400 with the cause; that too many
fetches are under way already is a 429. What a body is, its bytes tell (`epd.images`).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_address

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from epd.config import FetchConfig
from epd.errors import EpdError, ErrorKind
from epd.obs import metrics
from epd.turns import Turns
from gateway.fetch.addresses import Address
from gateway.fetch.policy import Policy
from gateway.fetch.urls import Target, follow, parse, refuse

_log = logging.getLogger(__name__)
_CHUNK = 64 << 10
_MOST_HEADERS, _MOST_LINE = 128, 8190
"""Lines of an answer's head, and of its trailers; bytes of each."""
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
# Pictures are compressed already; a body that could unfold to any size is never read.
_HEADERS = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "epd"}


def is_web_url(text: str) -> bool:
    """Whether a client means a URL that would have to be fetched."""
    return text[:16].lstrip().lower().startswith(("http:", "https:"))


class Fetcher:
    """Fetches pictures for one gateway, at most `concurrency` at a time.

    Nothing enters or outlives a fetch: no proxy, cookie, credential or connection.
    """

    def __init__(self, config: FetchConfig) -> None:
        self._config = config
        self._policy = Policy(config)
        self._places = Turns(config.concurrency)
        self._hosts: dict[str, _HostPlaces] = {}

    def close(self) -> None:
        self._policy.close()

    async def fetch(self, url: str, param: str, client: bytes = b"") -> bytes:
        """The body that `url` leads to. Clients take turns.

        Raises:
            EpdError: INVALID_IMAGE_URL, the policy refuses the URL or the fetch failed,
                with the cause; IMAGE_TOO_LARGE; OVERLOADED, no place in good time.
        """
        outcome = "failed"
        try:
            if self._config.mode == "off":
                refuse("fetching images from URLs is off here; send a data: URL", param)
            body = await self._in_time(parse(url, param), param, client)
            outcome = "fetched"
            return body
        except EpdError as error:
            outcome = str(error.kind)
            raise
        finally:
            metrics.IMAGE_FETCHES.labels(outcome).inc()

    async def _in_time(self, target: Target, param: str, client: bytes) -> bytes:
        """Everything under one deadline, the wait for a place included. Whoever waited for
        most of it says nothing of the image's server by running out of time."""
        total_s = self._config.total_s
        clock = asyncio.get_running_loop().time
        late = clock() + total_s / 2
        begun = False
        try:
            async with asyncio.timeout(total_s), self._place(target.host, client):
                begun = clock() < late
                return await self._follow(target, param)
        except TimeoutError:
            if begun:
                refuse(f"the image did not arrive within {total_s:g} s", param)
        raise EpdError(
            ErrorKind.OVERLOADED,
            f"too many images are being fetched ({self._config.concurrency} at once are, "
            f"{self._config.per_host} of one host); try again",
            param=param,
            retry_after_s=1.0,
        )

    @asynccontextmanager
    async def _place(self, host: str, client: bytes) -> AsyncIterator[None]:
        """First one of the host's own places, so that one slow host can't take them all."""
        mine = self._hosts.setdefault(host, _HostPlaces(self._config.per_host))
        mine.users += 1
        try:
            async with mine.places.place(client), self._places.place(client):
                yield
        finally:
            mine.users -= 1
            if not mine.users:
                del self._hosts[host]

    async def _follow(self, target: Target, param: str) -> bytes:
        for _ in range(self._config.max_redirects + 1):
            found = await self._get(target, param)
            if isinstance(found, bytes):
                return found
            target = follow(target, found, param)
        refuse(f"the URL redirects more than {self._config.max_redirects} times", param)

    async def _get(self, target: Target, param: str) -> bytes | str:
        """One request: the body, or where a redirect leads."""
        addresses = await self._policy.addresses(target, param)
        url = URL(target.url, encoded=True)
        try:
            async with (
                _session(target, addresses) as session,
                session.get(url, allow_redirects=False) as response,
            ):
                _check_peer(response, addresses)
                return await _answer(response, param, self._config.max_bytes)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            _log.info("fetching an image from %s: %s", target.host, type(error).__name__)
            refuse(_cause(error), param)


class _HostPlaces:
    def __init__(self, places: int) -> None:
        self.places = Turns(places)
        self.users = 0


class _Pinned(AbstractResolver):
    """Answers with the addresses that were checked, and looks nothing up."""

    def __init__(self, host: str, addresses: list[Address]) -> None:
        self._host = host
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        if host != self._host:
            raise OSError("another host than the one that was checked")
        return [
            ResolveResult(
                hostname=host,
                host=str(address),
                port=port,
                family=socket.AF_INET if address.version == 4 else socket.AF_INET6,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in self._addresses
        ]

    async def close(self) -> None:
        """Nothing is held."""


def _session(target: Target, addresses: list[Address]) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(
        resolver=_Pinned(target.host, addresses), use_dns_cache=False, force_close=True
    )
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=_HEADERS,
        timeout=aiohttp.ClientTimeout(total=None),  # the deadline is the whole fetch's
        trust_env=False,
        auto_decompress=False,
        max_headers=_MOST_HEADERS,
        max_line_size=_MOST_LINE,
        max_field_size=_MOST_LINE,
    )


def _check_peer(response: aiohttp.ClientResponse, addresses: list[Address]) -> None:
    """The socket itself says where it went."""
    connection = response.connection
    if connection is None or connection.transport is None:
        return  # a body that short has been read already, over a connection made above
    peer = connection.transport.get_extra_info("peername")
    assert ip_address(peer[0]) in addresses, "dialled an address that was not checked"


async def _answer(response: aiohttp.ClientResponse, param: str, max_bytes: int) -> bytes | str:
    if response.status in _REDIRECTS and "Location" in response.headers:
        return response.headers["Location"]
    if response.status != 200:
        refuse(f"the image's server answered with status {response.status}", param)
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        refuse("the image's server answered with a compressed body", param)
    if (response.content_length or 0) > max_bytes:
        raise _too_large(max_bytes, param)
    body = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK):
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes, param)
    if not body:
        refuse("the image's server answered with an empty body", param)
    return bytes(body)


def _cause(error: Exception) -> str:
    """What a client can do something with; no address, no text from the other end."""
    if isinstance(error, aiohttp.ClientSSLError):
        return "the image's server has no valid TLS certificate, or TLS failed"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "the image's server can't be connected to"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the image's server cut the body short"
    if isinstance(error, aiohttp.ServerDisconnectedError | ConnectionError):
        return "the image's server broke the connection"
    return "the image's server did not answer in proper HTTP"


def _too_large(max_bytes: int, param: str) -> EpdError:
    reason = f"the image has more than {max_bytes} bytes, the most that is fetched"
    return EpdError(ErrorKind.IMAGE_TOO_LARGE, reason, param=param)
