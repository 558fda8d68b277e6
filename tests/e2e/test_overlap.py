"""What overlaps inside one request, as its timeline shows it.

Prompts of many chunks, so that there is something to overlap with.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.conftest import MakeCluster, another_picture, user

WORDS = "Say what you see, and where you see it, in as many words as you like. "
# Chunks that take longer than a message needs on a crowded machine.
SLOW = {"prefill": {"EPD_FAULTS": "step.hang=0.05"}}


@pytest.fixture(scope="module")
def chunked(make_cluster: MakeCluster) -> Cluster:
    settings = {"kv.block_tokens": 8, "prefill.chunk_tokens": 16}
    return make_cluster(settings=settings, environ=SLOW)


@pytest.fixture
def cluster(chunked: Cluster) -> Iterator[Cluster]:
    chunked.make_whole()
    yield chunked
    chunked.assert_clean()


def phases(cluster: Cluster, *parts: str | bytes) -> dict[str, tuple[float, float]]:
    """(start, end) of each phase of a new request, ms."""
    body = {"messages": [user(*parts)], "temperature": 0, "max_tokens": 4, "timeline": True}
    reply = cluster.chat(body)
    assert reply.status == 200, reply.body
    found: list[dict[str, Any]] = reply.json["timeline"]["phases"]
    return {p["name"]: (p["start_ms"], p["start_ms"] + p["duration_ms"]) for p in found}


def test_decode_reads_blocks_while_prefill_computes_the_next_chunks(cluster: Cluster) -> None:
    timeline = phases(cluster, WORDS * 12)
    (began, computed), (reading, _) = timeline["prefill"], timeline["kv transfer"]
    assert began < reading < computed, timeline


@pytest.mark.long
def test_switched_off_one_comes_after_the_other(make_cluster: MakeCluster) -> None:
    settings = {"kv.block_tokens": 8, "prefill.chunk_tokens": 16, "prefill.overlap": False}
    cluster = make_cluster(settings=settings, environ=SLOW)
    pictures = [another_picture() for _ in range(2)]
    timeline = phases(cluster, WORDS * 12, *pictures, "What is this?")
    landed = max(timeline[f"embedding transfer[{i}]"][1] for i in range(2))
    (_, computed), (reading, _) = timeline["prefill"], timeline["kv transfer"]
    assert landed < (landed + computed) / 2 < reading, timeline
    cluster.assert_clean()


def test_pictures_are_encoded_and_read_within_prefill(cluster: Cluster) -> None:
    timeline = phases(cluster, WORDS * 12, another_picture(), "What is this?")
    (began, computed), (encoding, _) = timeline["prefill"], timeline["encode[0]"]
    landed = timeline["embedding transfer[0]"][1]
    assert began <= encoding < landed <= computed, timeline
    # The words before it were computed meanwhile: decode reads their blocks already.
    assert timeline["kv transfer"][0] < landed, timeline
