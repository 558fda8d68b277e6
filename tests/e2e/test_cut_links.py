"""Every process in a network namespace of its own, and cables that are pulled while all of
them live: nothing is reset, nobody is told, packets just vanish.

gRPC goes over one switch (``lan``), Mooncake over another (``data``).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from tests.e2e.cluster import GATEWAY, STAGES, Cluster
from tests.e2e.conftest import DATA, MakeCluster, grey_png, user
from tests.e2e.member import Reply
from tests.e2e.test_dead_stages import ONLY_STREAMS
from tests.netns import LAN, Link, Network, Node
from tests.waiting import promised

pytestmark = pytest.mark.timeout(400)

WITHIN_S = 8.0


@pytest.fixture(scope="module")
def running(make_cluster: MakeCluster, nodes: Mapping[str, Node]) -> Cluster:
    return make_cluster(nodes=nodes, data=DATA, settings=ONLY_STREAMS)


@pytest.fixture
def spread(running: Cluster) -> Iterator[Cluster]:
    """The service; each test leaves it whole, clean, and with the processes it had."""
    running.make_whole()
    pids = running.pids
    yield running
    assert running.pids == pids
    assert all(member.alive for member in running.members)
    running.assert_clean()


_numbers = itertools.count(1)


def ask(cluster: Cluster, *, picture: bool = True, max_tokens: int = 4) -> Reply:
    """A question that no cache knows, so that every stage has work to do."""
    number = next(_numbers)
    parts = [grey_png(96, 96, number % 256)] if picture else []
    message = user(f"{number}", *parts, "What can you do?")
    body = {"model": "checkpoint", "messages": [message], "temperature": 0}
    return cluster.chat({**body, "max_tokens": max_tokens})


def assert_refused(reply: Reply, *codes: str) -> None:
    assert reply.status == 503, reply
    assert reply.seconds < promised(WITHIN_S)
    assert reply.error["type"] == "server_error"
    assert reply.error["code"] in codes


def assert_recovers(cluster: Cluster, limit_s: float = 5.0) -> None:
    """Readers leave a lost peer alone for a second, and probe it for up to three."""
    deadline = time.monotonic() + promised(limit_s)
    while (reply := ask(cluster)).status != 200:
        assert_refused(reply, "transfer_failed")
        assert time.monotonic() < deadline, "the network is back, the answers are not"
        time.sleep(0.2)


@contextmanager
def cut(network: Network, *links: Link) -> Iterator[None]:
    for link in links:
        network.cut(link)
    try:
        yield
    finally:
        for link in links:
            network.heal(link)


@contextmanager
def separated(network: Network, one: Link, other: Link) -> Iterator[None]:
    network.separate(one, other)
    try:
        yield
    finally:
        network.unite(one, other)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_is_cut_off_is_503_within_8_seconds(
    network: Network, nodes: Mapping[str, Node], spread: Cluster, stage: str
) -> None:
    assert ask(spread).status == 200
    node = nodes[stage]
    with cut(network, node.link(LAN), node.link(DATA)):
        for _ in range(2):  # before the gateway has noticed, and after
            assert_refused(ask(spread), "stage_unavailable", "transfer_failed")
    spread.until_serving()
    assert ask(spread).status == 200


@pytest.mark.long
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_the_gateway_alone_does_not_reach(
    network: Network, nodes: Mapping[str, Node], spread: Cluster, stage: str
) -> None:
    with separated(network, nodes[GATEWAY].link(), nodes[stage].link()):
        for _ in range(2):
            assert_refused(ask(spread), "stage_unavailable")
    spread.until_serving()
    assert ask(spread).status == 200


def test_tensors_take_the_address_of_the_configuration(
    network: Network, nodes: Mapping[str, Node], spread: Cluster
) -> None:
    link = nodes["decode"].link(DATA)
    before, moved = network.received(link), kv_bytes(spread)
    assert ask(spread).status == 200
    moved = kv_bytes(spread) - moved
    assert moved > 0
    assert network.received(link) - before > moved


def kv_bytes(cluster: Cluster) -> float:
    """epd_transfer_bytes_total of decode."""
    lines = cluster.worker("decode").metrics().splitlines()
    (found,) = [line for line in lines if line.startswith('epd_transfer_bytes_total{kind="kv"')]
    return float(found.split()[-1])


def test_without_the_path_between_prefill_and_decode(
    network: Network, nodes: Mapping[str, Node], spread: Cluster
) -> None:
    """What needs it fails with a typed error; what doesn't goes on; nothing falls back."""
    assert ask(spread, picture=False).status == 200
    with separated(network, nodes["prefill"].link(DATA), nodes["decode"].link(DATA)):
        assert_refused(ask(spread, picture=False), "transfer_failed")
        assert_refused(ask(spread), "transfer_failed")
        assert ask(spread, max_tokens=1).status == 200
        assert ask(spread, picture=False, max_tokens=1).status == 200
    assert_recovers(spread)


def test_without_the_path_between_encode_and_prefill(
    network: Network, nodes: Mapping[str, Node], spread: Cluster
) -> None:
    with separated(network, nodes["encode"].link(DATA), nodes["prefill"].link(DATA)):
        assert_refused(ask(spread, max_tokens=1), "transfer_failed")
        assert ask(spread, picture=False).status == 200
    assert_recovers(spread)


def test_with_mooncakes_network_down(
    network: Network, nodes: Mapping[str, Node], spread: Cluster
) -> None:
    with cut(network, *(nodes[stage].link(DATA) for stage in STAGES)):
        assert_refused(ask(spread), "transfer_failed")
        assert_refused(ask(spread, picture=False), "transfer_failed")
        assert ask(spread, picture=False, max_tokens=1).status == 200
    assert_recovers(spread)
