"""KV through a mirror of the pool, as on a GPU, in real processes on the CPU.

Prefill computes in one memory and announces another, decode reads into one and computes in
another: an answer is right only if every block was carried over at its time.
"""

from __future__ import annotations

import pytest
from openai import OpenAI

from tests.e2e.cluster import Cluster
from tests.e2e.conftest import MakeCluster, answer, demo_questions, picture


@pytest.fixture(scope="module")
def staged(make_cluster: MakeCluster) -> Cluster:
    # Small blocks: a prompt is several announcements, a read several pieces.
    return make_cluster(settings={"transfer.staging": "always", "kv.block_tokens": "8"})


@pytest.mark.long
def test_the_demo_questions_are_answered(staged: Cluster) -> None:
    client = OpenAI(base_url=staged.base_url, api_key="none", timeout=60, max_retries=0)
    for known in demo_questions():
        pictures = [picture(name) for name in known["pictures"]]
        for _ in range(2):  # the second time from the prefix caches
            assert answer(client, *pictures, known["question"]) == known["answer"]
    staged.assert_clean()
