"""A dead or hung stage: a typed error soon, and work again when it is back."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.cluster import STAGES, Cluster
from tests.e2e.conftest import MakeCluster, grey_png, user
from tests.e2e.member import Reply, request
from tests.waiting import block_until, promised

ONLY_STREAMS = {"gateway.recover_s": 600}
"""Who waits so long although no part of its answer was sent is late on a crowded machine, too,
where promised times are stretched."""


@pytest.fixture(scope="module")
def running(make_cluster: MakeCluster) -> Cluster:
    return make_cluster(settings=ONLY_STREAMS)


@pytest.fixture
def mortal(running: Cluster) -> Cluster:
    """A service that tests may hurt; they leave it whole again."""
    running.make_whole()
    return running


def _ask(cluster: Cluster, model: str, shade: int, **fields: object) -> Reply:
    """A question about a picture of its own, so that every stage has work to do."""
    messages = [user(grey_png(96, 96, shade), "Describe the image.")]
    body = {"model": model, "messages": messages, "temperature": 0, **fields}
    return request(cluster.address, "/v1/chat/completions", body, 30.0)


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_stage_is_503_and_works_when_it_is_back(mortal: Cluster, stage: str) -> None:
    model, shade = mortal.model, 10 + STAGES.index(stage)
    assert _ask(mortal, model, shade).status == 200
    others = [member for member in mortal.members if member.role != stage]
    pids = [member.pid for member in others]
    mortal.worker(stage).end(signal.SIGKILL)
    reply = _ask(mortal, model, shade + 30)
    assert reply.status == 503, reply
    assert reply.seconds < promised(2.0)
    assert reply.error["code"] in ("stage_unavailable", "transfer_failed")
    assert stage in reply.error["message"]
    assert request(mortal.address, "/health").status == 200
    mortal.restart(stage)
    assert _ask(mortal, model, shade + 60).status == 200
    assert [member.pid for member in others] == pids
    mortal.assert_clean()


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_killed_in_the_middle(mortal: Cluster, stage: str) -> None:
    """Requests under way end with a typed error or a whole answer; none hangs."""
    model, shade = mortal.model, 120 + 10 * STAGES.index(stage)
    long = {"ignore_eos": True, "max_tokens": 400}
    with ThreadPoolExecutor(6) as pool:
        replies = [pool.submit(_ask, mortal, model, shade + i, **long) for i in range(6)]
        time.sleep(0.15)  # into the work; whatever is reached, the outcome is typed
        mortal.worker(stage).end(signal.SIGKILL)
        done = [future.result() for future in replies]
    assert {reply.status for reply in done} <= {200, 503}
    for reply in done:
        if reply.status == 503:
            assert reply.error["type"] == "server_error"
            assert reply.seconds < promised(0.15 + 2.0)
    mortal.restart(stage)
    assert _ask(mortal, model, shade + 9).status == 200
    mortal.assert_clean()


@pytest.mark.parametrize("stage", STAGES)
def test_who_waits_for_a_stage_hears_within_2_seconds_that_it_died(
    mortal: Cluster, stage: str
) -> None:
    """Stopped first, so that the request is there when it dies, on a machine of any speed."""
    model, shade = mortal.model, 170 + STAGES.index(stage)
    assert _ask(mortal, model, shade).status == 200
    with ThreadPoolExecutor(1) as pool:
        with mortal.paused(stage) as worker:
            # For decode the same picture: of encode's stream nothing is left to wait for.
            known = stage == "decode"
            asked = pool.submit(_ask, mortal, model, shade + (0 if known else 10))
            streams = 1 if stage == "prefill" else 2
            block_until(lambda: mortal.gateway.debug_state()["streams"] == streams)
            worker.end(signal.SIGKILL)
        died = time.monotonic()
        reply = asked.result()
        assert time.monotonic() - died < promised(2.0)
    assert reply.status == 503, reply
    assert stage in reply.error["message"]
    mortal.restart(stage)
    mortal.assert_clean()


@pytest.mark.parametrize("stage", STAGES)
def test_a_stopped_stage_is_an_error_within_8_seconds(mortal: Cluster, stage: str) -> None:
    model, shade = mortal.model, 200 + STAGES.index(stage)
    with mortal.paused(stage):
        reply = _ask(mortal, model, shade)
    assert reply.status == 503, reply
    assert reply.seconds < promised(8.0)
    mortal.until_serving()
    assert _ask(mortal, model, shade + 10).status == 200
    mortal.assert_clean()
