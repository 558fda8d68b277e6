"""Stages in one process compute what they compute apart: against transformers, and bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import TinyCheckpoint
from tests.parity import test_pipeline as pipeline
from tests.parity import test_pipeline_exact as exact
from tests.parity.conversations import ALONE, CONCURRENT
from tests.parity.service import WHOLE, service

MONOLITHIC = ["encode+prefill+decode"]
GROUPS = {"monolithic": MONOLITHIC, "prefill and decode": ["encode", "prefill+decode"]}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize(
    "family", ["qwen3_vl", pytest.param("llava_onevision", marks=pytest.mark.long)]
)
def test_colocated_stages_answer_as_generate_does(
    family: str, groups: list[str], tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    path = tiny_checkpoint(family)
    together, alone = (
        [pipeline.Oracle.of(path, case) for case in cases] for cases in (CONCURRENT, ALONE)
    )
    with service(tmp_path, path, 7, groups=groups) as cluster:
        for _ in range(2):  # the second time prompts are cached
            pipeline._ask_all(cluster, together, alone)


@pytest.mark.timeout(400)
def test_one_process_gives_the_bits_of_four(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    path = tiny_checkpoint("qwen3_vl", "bfloat16")
    settings = {"model.exact": True}
    apart, joined = tmp_path / "apart", tmp_path / "joined"
    apart.mkdir()
    joined.mkdir()
    with service(apart, path, WHOLE, settings) as cluster:
        expected = [exact._ask(cluster, conversation) for conversation in CONCURRENT]
    with service(joined, path, 7, settings, MONOLITHIC) as cluster:
        assert exact._together(cluster, CONCURRENT[::-1]) == expected[::-1]
        assert exact._together(cluster, CONCURRENT) == expected
        cluster.assert_clean()
    assert len(set(expected)) == len(expected)
