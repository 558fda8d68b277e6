"""A gateway on IPv6: its addresses are ones that can be dialled as they are shown."""

from __future__ import annotations

import asyncio
import socket
import urllib.request

import pytest

from epd.client import AsyncClient, user
from epd.jobs import Stage
from gateway.checkpoint import Loaded
from tests.e2e.gateway_house import House, config


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")
async def test_all_ports(loaded: Loaded) -> None:
    house = House(loaded, config(host="::1", metrics_host="::1"))
    addresses = await house.gateway.start()
    house.http, house.grpc = addresses["http"], addresses["grpc"]
    house.membership = addresses["membership"]
    try:
        for stage in Stage:
            await house.add(stage)
        for name in ("http", "metrics"):
            ready = f"http://{addresses[name]}/ready"
            assert b"ready" in await asyncio.to_thread(_read, ready)
        async with AsyncClient(house.grpc) as client:
            assert (await client.chat([user("what?")])).text
        await house.settled()
    finally:
        await house.close()


def _read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=20) as response:
        found: bytes = response.read()
    return found
