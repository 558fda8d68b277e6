"""Names of gateways: one DNS name may stand for several, and for others tomorrow."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass

from epd.errors import invalid


@dataclass(frozen=True, slots=True)
class Target:
    """One address that a configured name stands for."""

    name: str
    """As configured: "host:port"."""
    host: str
    """Its host, which the certificate must be for."""
    address: str
    """ "ip:port" to dial."""


async def resolve(name: str) -> set[Target]:
    """All addresses of "host:port"; only IPv4 ones where it has both kinds, so that a
    worker registers at a gateway once.

    Raises:
        OSError: DNS knows none, or doesn't answer.
        EpdError: it isn't host:port.
    """
    host, port = split(name)
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    kinds = {family for family, *_ in found}
    chosen = socket.AF_INET if socket.AF_INET in kinds else socket.AF_INET6
    addresses = {str(address[0]) for family, *_, address in found if family == chosen}
    shown = [f"[{one}]" if ":" in one else one for one in addresses]
    return {Target(name, host, f"{one}:{port}") for one in shown}


def split(name: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port".

    Raises:
        EpdError: it is neither.
    """
    host, colon, port = name.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
        raise invalid(f"worker.gateways: {name!r} is not host:port", "worker.gateways")
    return host, int(port)
