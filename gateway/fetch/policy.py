"""Which hosts may be asked, and at which addresses: decided anew for every hop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address

from epd.config import FetchConfig
from gateway.fetch.addresses import Address, is_public
from gateway.fetch.urls import Target, refuse

_LOOK_UPS = 4
"""For each fetch: it asks each server twice, 5 s each time, and two or three are usual."""


class Policy:
    """The configured rules, and the resolver under them."""

    def __init__(self, config: FetchConfig) -> None:
        self._config = config
        self._allowed = frozenset(name.lower() for name in config.hosts)
        # Own threads: a name server that is slow must not hold up other work. More than there
        # are fetches: the system's resolver goes on for a while when nobody waits any more.
        self._threads = ThreadPoolExecutor(_LOOK_UPS * config.concurrency, "resolve")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def addresses(self, target: Target, param: str) -> list[Address]:
        """Where to dial `target`: the addresses of its host, each of them allowed.

        The caller must dial one of these and not resolve again.

        Raises:
            EpdError: INVALID_IMAGE_URL, host, port or an address is refused.
        """
        self._check_host(target, param)
        addresses = await self._resolve(target, param)
        if not self._config.allow_private and not all(map(is_public, addresses)):
            refuse("the URL's host is not on the public internet", param)
        return addresses

    def _check_host(self, target: Target, param: str) -> None:
        usual_port = target.port in self._config.ports
        listed = any(
            (usual_port and name in self._allowed) or f"{name}:{target.port}" in self._allowed
            for name in _patterns(target)
        )
        if self._config.mode != "public" and not listed:
            refuse("the URL's host and port are not on the list of this server", param)
        if not usual_port and not listed:
            refuse(f"images are not fetched from port {target.port}", param)

    async def _resolve(self, target: Target, param: str) -> list[Address]:
        if target.address is not None:
            return [target.address]
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, look_up, target.host)
        except (OSError, ValueError, UnicodeError):
            refuse("the URL's host can't be resolved", param)


def look_up(host: str) -> list[Address]:
    """All addresses of a name, from the system's resolver, which blocks."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(ip_address(sockaddr[0]) for *_, sockaddr in found))


def _patterns(target: Target) -> Iterator[str]:
    """How a host may be listed: by its name, or as ``*.`` and a parent's name."""
    yield f"[{target.host}]" if ":" in target.host else target.host
    if target.address is None:
        labels = target.host.split(".")
        for at in range(1, len(labels)):
            yield "*." + ".".join(labels[at:])
