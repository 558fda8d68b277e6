"""Stages in network namespaces of their own, and cables that are pulled while all processes
live: nothing is reset, nobody is told, packets just vanish."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from tests.e2e.cluster import GATEWAY, STAGES, Cluster, Reply
from tests.e2e.conftest import MakeCluster, grey_png, user
from tests.netns import Link, Network, Node, open_network

WITHIN_S = 8.0


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with open_network() as network:
        yield network


@pytest.fixture(scope="module")
def nodes(network: Network) -> Mapping[str, Node]:
    return {role: network.node(role) for role in (GATEWAY, *STAGES)}


@pytest.fixture(scope="module")
def spread(make_cluster: MakeCluster, nodes: Mapping[str, Node]) -> Cluster:
    return make_cluster(nodes=nodes)


def ask(cluster: Cluster, shade: int) -> Reply:
    """A question about a picture of its own, so that every stage has work to do."""
    messages = [user(grey_png(96, 96, shade), "Describe the image.")]
    return cluster.chat({"model": "checkpoint", "messages": messages, "temperature": 0})


@contextmanager
def cut(network: Network, link: Link) -> Iterator[None]:
    network.cut(link)
    try:
        yield
    finally:
        network.heal(link)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_is_cut_off_is_503_within_8_seconds(
    network: Network, nodes: Mapping[str, Node], spread: Cluster, stage: str
) -> None:
    shade, pids = 10 + STAGES.index(stage), spread.pids
    assert ask(spread, shade).status == 200
    with cut(network, nodes[stage].link()):
        for late in (30, 60):  # before the gateway has noticed, and after
            reply = ask(spread, shade + late)
            assert reply.status == 503, reply
            assert reply.seconds < WITHIN_S
            assert reply.error["type"] == "server_error"
    spread.until_serving()
    assert ask(spread, shade + 90).status == 200
    assert spread.pids == pids
    spread.assert_clean()
