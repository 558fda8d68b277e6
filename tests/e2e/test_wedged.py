"""A worker whose forward never ends: it says so, says why, and makes way."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import STAGES, Cluster
from tests.e2e.conftest import grey_png, user
from tests.e2e.member import Worker, request
from tests.waiting import block_until

STALL_S, WEDGED_S = 1.0, 3.0


def question(shade: int) -> dict[str, Any]:
    message = user(f"{shade}", grey_png(96, 96, 40 * shade), "Describe it.")
    return {"messages": [message], "temperature": 0, "max_tokens": 8, "ignore_eos": True}


def not_serving(worker: Worker) -> bool:
    return request(worker.report["metrics"], "/ready").status == 503


@pytest.mark.parametrize(
    "stage", [*(pytest.param(stage, marks=pytest.mark.long) for stage in STAGES[:2]), "decode"]
)
def test_a_wedged_worker_is_not_serving_and_makes_way(tmp_path: Path, stage: str) -> None:
    """Its request goes on elsewhere, with the same answer."""
    settings = {"worker.stall_s": STALL_S, "worker.wedged_s": WEDGED_S, "model.exact": "true"}
    cluster = Cluster(tmp_path, counts={stage: 2}, settings=settings)
    wedged = cluster.worker(stage)
    wedged.environ["EPD_FAULTS"] = "step.hang=600"
    cluster.start()
    bodies = [question(shade) for shade in range(6)]
    try:
        with ThreadPoolExecutor(len(bodies)) as pool:
            # As many as it takes until both workers have one.
            asked = [pool.submit(cluster.chat, body) for body in bodies]
            block_until(lambda: not wedged.alive or not_serving(wedged))
            found = [future.result().text for future in asked]
        assert wedged.finish() == 1
        log = wedged.log.read_text()
        assert " waits for " in log
        assert "giving up" in log
        wedged.environ["EPD_FAULTS"] = ""
        cluster.restart(stage)
        assert [cluster.chat(body).text for body in bodies] == found
        cluster.assert_clean()
    finally:
        cluster.close()
