"""Dashboards depend on metric names: the documented table is the code's, name for name."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics import MetricWrapperBase

from epd.obs import metrics as stage_metrics
from epd.transfer import metrics as transfer_metrics

OPERATIONS = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
KINDS = {Counter: "counter", Gauge: "gauge", Histogram: "histogram"}


def documented() -> set[tuple[str, str, tuple[str, ...]]]:
    rows = re.findall(r"^\| `(epd_\w+)` \| (\w+) \| ([\w, ]*)\|", OPERATIONS.read_text(), re.M)
    return {
        (name, kind, tuple(filter(None, re.split(r"[, ]+", labels)))) for name, kind, labels in rows
    }


def defined() -> set[tuple[str, str, tuple[str, ...]]]:
    found = set()
    for module in (stage_metrics, transfer_metrics):
        for value in vars(module).values():
            if isinstance(value, MetricWrapperBase):
                kind = KINDS[type(value)]
                suffix = "_total" if kind == "counter" else ""
                found.add((f"{value._name}{suffix}", kind, tuple(value._labelnames)))
    return found


def test_a_scrape_has_no_series_beside_the_documented_ones() -> None:
    stage_metrics.REQUESTS.labels("gateway", "ok").inc()
    stage_metrics.STEP_SECONDS.labels("decode").observe(1)
    lines = generate_latest().decode().splitlines()
    scraped = {found[1] for line in lines if (found := re.match(r"(epd_\w+)[ {]", line))}
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in scraped} <= {
        name for name, _, _ in documented()
    }


def test_the_documented_metrics_are_those_of_the_code() -> None:
    assert documented() == defined()
    assert len(documented()) > 15
