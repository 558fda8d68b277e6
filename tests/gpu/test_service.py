"""Three processes on a CUDA device: right answers, KV through pinned host memory."""

from __future__ import annotations

import pytest
from openai import OpenAI

from tests.e2e.cluster import Cluster
from tests.e2e.conftest import MakeCluster, answer, demo_questions, make_cluster, picture

__all__ = ["make_cluster"]


@pytest.fixture(scope="module", params=[32, 256], ids=["triton", "varlen"])
def on_device(request: pytest.FixtureRequest, make_cluster: MakeCluster) -> Cluster:
    tokens = str(request.param)
    return make_cluster(settings={"model.device": "cuda", "kv.block_tokens": tokens})


def test_the_demo_questions_are_answered(on_device: Cluster) -> None:
    client = OpenAI(base_url=on_device.base_url, api_key="none", timeout=60, max_retries=0)
    for known in demo_questions():
        pictures = [picture(name) for name in known["pictures"]]
        assert answer(client, *pictures, known["question"]) == known["answer"]
    on_device.assert_clean()
