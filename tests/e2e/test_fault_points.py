"""Every fault point, in every stage that passes it, through the whole service: a typed error
or the right answer, counted; and the next request is right again."""

from __future__ import annotations

import itertools
import re

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.conftest import MakeCluster, grey_png, user
from tests.e2e.member import Reply

pytestmark = pytest.mark.long
SETTINGS = {"transfer.read_deadline_s": 1.0, "transfer.quarantine_margin_s": 0.2}
_shades = itertools.count(1)


@pytest.fixture(scope="module")
def running(make_cluster: MakeCluster) -> Cluster:
    return make_cluster(settings=SETTINGS)


@pytest.fixture
def cluster(running: Cluster) -> Cluster:
    """Each test finds it whole and without faults."""
    running.make_whole()
    for worker in running.workers:
        if worker.environ.get("EPD_FAULTS"):
            faulty(running, worker.role, "")
    return running


def faulty(cluster: Cluster, stage: str, spec: str) -> None:
    """Start a stage again with these fault points; "": none."""
    worker = cluster.worker(stage)
    worker.end()
    worker.environ["EPD_FAULTS"] = spec
    cluster.restart(stage)


def ask(cluster: Cluster, shade: int) -> Reply:
    body = {"messages": [user(grey_png(96, 96, shade), "Describe the image.")], "temperature": 0}
    return cluster.chat({**body, "max_tokens": 6, "ignore_eos": True})


def failures(cluster: Cluster, stage: str) -> dict[str, float]:
    """epd_transfer_failures_total of one stage, by reason."""
    page = cluster.worker(stage).metrics()
    found = re.findall(r'epd_transfer_failures_total\{.*reason="(\w+)"\} ([\d.e+]+)', page)
    return {reason: float(value) for reason, value in found if float(value)}


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_what_a_reader_meets(cluster: Cluster, stage: str) -> None:
    """Passage by passage: 1 refused, 2 never ends, 3 fails, 4 has a byte flipped, 5 is slow."""
    shade = next(_shades)
    right = ask(cluster, shade).text
    spec = "transfer.refuse:1/100,transfer.drop:1/100,transfer.fail:1/100"
    faulty(cluster, stage, f"{spec},transfer.flip:1/100,transfer.delay=0.2")
    try:
        # Three attempts of one request meet what may pass, and say so.
        reply = ask(cluster, shade)
        assert (reply.status, reply.error["code"]) == (503, "transfer_failed"), reply
        # What arrives damaged is nobody's to try again with.
        reply = ask(cluster, shade)
        assert (reply.status, reply.error["code"]) == (500, "checksum_mismatch"), reply
        assert failures(cluster, stage).keys() >= {"transfer_failed", "timeout", "checksum"}
        reply = ask(cluster, shade)
        assert reply.text == right
        assert reply.seconds > 0.2, "the delay"
        cluster.assert_clean()
    finally:
        faulty(cluster, stage, "")
    assert ask(cluster, shade).text == right


READERS = {"encode": "prefill", "prefill": "decode"}
ANNOUNCED = {
    "lease.stale": (1, 500, "checksum_mismatch"),
    "lease.wrong_rows": (1, 500, "checksum_mismatch"),
    "lease.short": (1, 500, "contract_mismatch"),
    # Worth another try, so as many as a request has.
    "lease.unregistered": (3, 503, "transfer_failed"),
}
"""(times it must happen, the answer's status, its code)"""


@pytest.mark.parametrize("point", ANNOUNCED)
@pytest.mark.parametrize("stage", READERS)
def test_what_an_owner_announces(cluster: Cluster, stage: str, point: str) -> None:
    """Embeddings of encode, KV blocks of prefill."""
    times, status, code = ANNOUNCED[point]
    reader = READERS[stage]
    shade = next(_shades)
    right = ask(cluster, shade).text
    faulty(cluster, stage, f"{point}:{times}/100")
    if stage == "encode":
        faulty(cluster, reader, "")  # it would still have the rows
    try:
        before = errors(cluster, reader)
        reply = ask(cluster, shade)
        assert (reply.status, reply.error["code"]) == (status, code), reply
        assert errors(cluster, reader) == before + times
        # Nobody is given the damaged bytes again, out of no cache.
        assert ask(cluster, shade).text == right
        cluster.assert_clean()
    finally:
        faulty(cluster, stage, "")
    assert ask(cluster, shade).text == right


def errors(cluster: Cluster, stage: str) -> int:
    """epd_errors_total of one stage, of all kinds."""
    page = cluster.worker(stage).metrics()
    found = re.findall(rf'epd_errors_total\{{kind="\w+",stage="{stage}"\}} ([\d.e+]+)', page)
    return int(sum(map(float, found)))
