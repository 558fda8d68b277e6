"""A little of `tests.cases.fuzz` in every run; ten thousand by hand."""

from __future__ import annotations

from tests.cases.fuzz import run, sender
from tests.e2e.cluster import Cluster


def test_nothing_that_a_client_sends_is_our_fault(cluster: Cluster) -> None:
    counts = run(sender(cluster.address), 120)
    assert sum(counts.values()) >= 60
    assert counts[400] > 10
    assert counts[200] > 0
