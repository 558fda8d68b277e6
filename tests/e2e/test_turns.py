"""Stage processes that take turns on the cores: the same answers, and they do wait."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.cluster import STAGES, Cluster
from tests.e2e.conftest import MakeCluster, grey_png, picture, user
from tests.e2e.test_encode_cache import counter


@pytest.fixture(scope="module")
def in_turn(make_cluster: MakeCluster, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    file = tmp_path_factory.mktemp("turns") / "turns"
    return make_cluster(settings={"worker.turns_file": file, "model.threads": 2})


def _asked(first_grey: int) -> list[dict[str, object]]:
    pictures = [picture("three_shapes.png"), *(grey_png(64, 80, first_grey + n) for n in range(7))]
    return [
        {"messages": [user(data, "Describe the image.")], "temperature": 0, "max_tokens": 24}
        for data in pictures
    ]


def _answers(cluster: Cluster, asked: list[dict[str, object]]) -> list[str]:
    with ThreadPoolExecutor(8) as pool:
        return [reply.text for reply in pool.map(cluster.chat, asked)]


def test_answers_are_those_of_a_service_without_turns(in_turn: Cluster, cluster: Cluster) -> None:
    asked = _asked(40)
    assert _answers(in_turn, asked) == _answers(cluster, asked)
    # A turn that is free takes microseconds; how often one is not is the machine's affair.
    for grey in range(50, 250, 10):
        if _waited_s(in_turn) > 0.1:
            break
        _answers(in_turn, _asked(grey))
    assert _waited_s(in_turn) > 0.1, "nobody waited for anybody"
    in_turn.assert_clean()


def _waited_s(cluster: Cluster) -> float:
    """All stages together, for each other's forwards."""
    name = "epd_turn_wait_seconds_total"
    return sum(counter(cluster.worker(s).metrics(), name, stage=s) for s in STAGES)
