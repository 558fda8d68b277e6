"""Mooncake's ports: who reaches them, and what reaching them means."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Mapping

import pytest

from epd.config import TransferConfig
from epd.transfer.engine import Engine
from epd.transfer.handshake import describe
from epd.transfer.wall import listening_ports
from tests.e2e.cluster import GATEWAY, STAGES, Cluster
from tests.e2e.conftest import COLOUR, DATA, MakeCluster, picture, user
from tests.netns import LAN, Network, Node
from tests.waiting import LIMIT_S

PORTS = (15000, 15999)
LOOK_S = 0.7
"""For what must not be reached; what must be has `LIMIT_S`."""


async def reachable(host: str, port: int, limit_s: float = LOOK_S) -> bool:
    try:
        async with asyncio.timeout(limit_s):
            _, writer = await asyncio.open_connection(host, port)
    except (TimeoutError, OSError):
        return False
    writer.close()
    return True


async def test_an_engine_on_loopback_is_reached_at_its_own_address_only() -> None:
    before = listening_ports()
    engine = Engine(TransferConfig(), "f00d", epoch=1)
    engine.start()
    try:
        ports = listening_ports() - before
        assert len(ports) == 2, "the handshake and the data port"
        for port in ports:
            assert await reachable("127.0.0.1", port, LIMIT_S)
            assert not await reachable("127.0.0.2", port)
    finally:
        await engine.close()


@pytest.fixture(scope="module")
def spread(make_cluster: MakeCluster, nodes: Mapping[str, Node]) -> Cluster:
    low, high = PORTS
    settings = {"transfer.port_min": low, "transfer.port_max": high}
    return make_cluster(nodes=nodes, data=DATA, settings=settings)


@pytest.fixture(scope="module")
def outsider(network: Network) -> Node:
    return network.node("outsider", [LAN])


def mooncake_ports(node: Node) -> list[int]:
    done = subprocess.run(node.command(["ss", "-Hltn"]), capture_output=True, text=True, check=True)
    ports = {int(line.split()[3].rpartition(":")[2]) for line in done.stdout.splitlines()}
    return sorted(port for port in ports if PORTS[0] <= port <= PORTS[1])


def dials(node: Node, host: str, port: int, limit_s: float = LOOK_S) -> bool:
    """Whether a TCP connection from this node comes about."""
    line = ["timeout", f"{limit_s}", "bash", "-c", f"exec 3<>/dev/tcp/{host}/{port}"]
    return subprocess.run(node.command(line), capture_output=True).returncode == 0


async def only_inside(stage: Node, peer: Node, outsider: Node) -> None:
    """Both ports are reached over the network of the data plane, and not otherwise."""
    inside, outside = stage.link(DATA).address, stage.address
    # Linux answers for all its addresses on all its interfaces.
    route = ["ip", "route", "replace", inside, "via", outside]
    subprocess.run(outsider.command(route), check=True)
    ports = mooncake_ports(stage)
    assert len(ports) == 2
    for port in ports:
        assert await asyncio.to_thread(dials, peer, inside, port, LIMIT_S), "peers reach it so"
        assert not await reachable(outside, port), f"{stage.name} answers on the LAN"
        for address, how in ((outside, "on the LAN"), (inside, "around the corner")):
            found = await asyncio.to_thread(dials, outsider, address, port)
            assert not found, f"{stage.name} is reached {how}"


async def test_the_data_plane_has_a_network_of_its_own(
    outsider: Node, nodes: Mapping[str, Node], spread: Cluster
) -> None:
    body = {"messages": [user(picture("red_circle.png"), COLOUR)], "temperature": 0}
    reply = spread.chat(body)
    assert reply.status == 200, reply
    assert "red" in reply.text
    await asyncio.gather(*(only_inside(nodes[s], nodes[GATEWAY], outsider) for s in STAGES))
    assert spread.chat(body).status == 200
    spread.assert_clean()


async def test_who_reaches_the_port_is_told_where_the_memory_is() -> None:
    """Why the wall is there. If this ever fails, Mooncake has learned to keep a secret."""
    engine = Engine(TransferConfig(), "f00d", epoch=1)
    engine.start()
    try:
        assert (await describe(engine.peer.session, 2.0)).protocol == "tcp"
        reader, writer = await asyncio.open_connection(*engine.peer.session.rsplit(":", 1))
        writer.write((3).to_bytes(8, "little") + b"\x01{}")
        length = int.from_bytes(await reader.readexactly(8), "little")
        assert str(engine.peer.identity_address).encode() in await reader.readexactly(length)
        writer.close()
    finally:
        await engine.close()
