"""int8 weights in real processes: the demo model still answers, and numbers don't mix."""

from __future__ import annotations

import pytest
from openai import OpenAI

from tests.e2e.cluster import Cluster
from tests.e2e.conftest import MakeCluster, answer, demo_questions, picture


@pytest.fixture(scope="module", params=["int8", "int8-decode"])
def int8(request: pytest.FixtureRequest, make_cluster: MakeCluster) -> Cluster:
    return make_cluster(settings={"model.quantize": request.param})


def test_the_demo_questions_are_answered(int8: Cluster) -> None:
    client = OpenAI(base_url=int8.base_url, api_key="none", timeout=60, max_retries=0)
    for known in demo_questions():
        pictures = [picture(name) for name in known["pictures"]]
        assert answer(client, *pictures, known["question"]) == known["answer"]
    int8.assert_clean()
