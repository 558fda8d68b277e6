"""Two hosts with addresses of their own, joined by 1 Gbit/s that loses one packet in a
hundred (tc does both): the same answers, and a cable that is pulled out and put back.

``one`` has the gateway, encode and decode, ``other`` has prefill: embeddings, KV blocks and
all control cross the cable.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping

import pytest

from tests.chaos.questions import Answer, questions
from tests.chaos.service import Place
from tests.chaos.traffic import Traffic
from tests.e2e.cluster import GATEWAY, STAGES, Cluster
from tests.e2e.conftest import MakeCluster
from tests.netns import Network, Node, open_network

RATE, LOSS = "1gbit", 0.01
MOST_ROUNDS = 40
SETTINGS = {
    "model.exact": "true",  # an answer doesn't depend on who else is there
    "limits.request_deadline_s": "30",
    # Nothing is kept: what is asked again crosses the cable again.
    "encode.cache_mib": "0",
    "prefill.embedding_cache": "false",
    "prefill.prefix_cache": "false",
    "decode.prefix_cache": "false",
}


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with open_network() as network:
        yield network


@pytest.fixture(scope="module")
def hosts(network: Network) -> tuple[Node, Node]:
    found = network.node("one"), network.node("other")
    for host in found:
        network.shape(host.link(), RATE)
    return found


@pytest.fixture(scope="module")
def running(make_cluster: MakeCluster, hosts: tuple[Node, Node]) -> Cluster:
    one, other = hosts
    nodes: Mapping[str, Node] = dict.fromkeys((GATEWAY, *STAGES), one) | {"prefill": other}
    return make_cluster(nodes=nodes, settings=SETTINGS)


@pytest.fixture(scope="module")
def answers(running: Cluster) -> Mapping[str, Answer]:
    """To each question, without loss."""
    traffic = Traffic([Place(running.gateway, None)], questions(), seed=3)
    asyncio.run(traffic.learn())
    return traffic.expected


@pytest.fixture
async def traffic(
    running: Cluster, network: Network, hosts: tuple[Node, Node], answers: Mapping[str, Answer]
) -> AsyncIterator[Traffic]:
    """Runs with loss. Everybody lives on, and nothing is left over."""
    pids, found = running.pids, Traffic([Place(running.gateway, None)], questions(), seed=3)
    found.expected |= answers
    for host in hosts:
        network.lose(host.link(), LOSS)
    yield found
    for host in hosts:
        network.lose(host.link(), 0)
    assert running.pids == pids
    assert all(member.alive for member in running.members)
    await asyncio.to_thread(running.assert_clean)


async def test_right_answers_over_a_cable_that_loses_packets(
    traffic: Traffic, network: Network, hosts: tuple[Node, Node]
) -> None:
    def resent() -> int:
        return sum(network.resent(host.link()) for host in hosts)

    before = resent()
    # The few packets of these small models may all arrive: ask until one had to be sent
    # again, or this showed nothing.
    for _ in range(MOST_ROUNDS):
        assert not await traffic.check_all()
        if resent() > before:
            return
    pytest.fail(f"not one packet of {MOST_ROUNDS} rounds was lost")


@pytest.mark.parametrize("seconds", [0.5, 4.0], ids=["short", "longer than a worker may be silent"])
async def test_a_cut_cable_heals_without_a_restart(
    traffic: Traffic, running: Cluster, network: Network, hosts: tuple[Node, Node], seconds: float
) -> None:
    clients = asyncio.create_task(traffic.run(3, bursts=False))
    _, other = hosts
    await asyncio.sleep(1.0)  # traffic before the cut
    network.cut(other.link())
    await asyncio.sleep(seconds)  # the length of the cut is the case
    network.heal(other.link())
    await asyncio.to_thread(running.until_serving)
    traffic.stop()
    await clients
    assert not traffic.outcomes.faults
    assert not await traffic.check_all()
