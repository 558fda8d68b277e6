"""A broken data path: typed errors, never a fallback, never a wrong answer.

One service in which prefill can't read embeddings and decode gets a flipped byte in every
KV block that it reads. What doesn't need the broken part still works.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.conftest import MakeCluster, picture, user
from tests.e2e.member import Reply

FAULTS = {
    "prefill": {"EPD_FAULTS": "transfer.fail"},
    "decode": {"EPD_FAULTS": "transfer.flip"},
}


@pytest.fixture(scope="module")
def broken(make_cluster: MakeCluster) -> Cluster:
    return make_cluster(environ=FAULTS)


def ask(cluster: Cluster, *parts: str | bytes, **options: Any) -> Reply:
    reply = cluster.chat({"messages": [user(*parts)], "temperature": 0, **options})
    cluster.assert_clean()
    return reply


def failures(cluster: Cluster, stage: str) -> float:
    """epd_transfer_failures_total of one stage, over all reasons."""
    return sum(
        float(line.split()[-1])
        for line in cluster.worker(stage).metrics().splitlines()
        if line.startswith("epd_transfer_failures_total")
    )


def test_what_needs_no_transfer_works(broken: Cluster) -> None:
    assert ask(broken, "What can you do?", max_tokens=1).status == 200


def test_embeddings_that_cannot_be_read_are_a_typed_error(broken: Cluster) -> None:
    before = failures(broken, "prefill")
    reply = ask(broken, picture("red_circle.png"), "What colour is the circle?", max_tokens=1)
    assert reply.status == 503
    assert reply.error["code"] == "transfer_failed"
    assert failures(broken, "prefill") > before


def test_kv_that_arrives_damaged_is_never_used(broken: Cluster) -> None:
    before = failures(broken, "decode")
    reply = ask(broken, "What can you do?", max_tokens=8)
    assert reply.status == 500
    assert reply.error["code"] == "checksum_mismatch"
    assert failures(broken, "decode") > before


def test_a_stream_ends_with_the_error_too(broken: Cluster) -> None:
    """The first token came from prefill, before decode could find the damage: the status is
    200, and after that token an error event ends the answer, which has no finish reason."""
    reply = ask(broken, "What can you do?", max_tokens=8, stream=True)
    assert reply.status == 200
    *chunks, error, done = reply.body.decode().strip().split("\n\n")
    assert done == "data: [DONE]"
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "checksum_mismatch"
    choices = [json.loads(chunk.removeprefix("data: "))["choices"][0] for chunk in chunks]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "I"
    assert [choice["finish_reason"] for choice in choices] == [None] * len(choices)
