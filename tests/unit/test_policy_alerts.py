"""Alerts, dashboards and autoscalers ask for metrics, labels and values that there are."""

from __future__ import annotations

import re

import pytest
import yaml
from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from epd.obs import metrics as stage_metrics
from epd.transfer import metrics as transfer_metrics
from tests.deployed import ADAPTER, PROMETHEUS, expressions, objects, recorded, rules
from tests.tracked import ROOT, tracked

OF_TARGETS = {"instance", "job", "namespace", "pod"}
OF_PROCESSES = {"process_start_time_seconds", "process_resident_memory_bytes"}
_SELECTOR = re.compile(r"(?<![\w:\"])([a-z_:]+[a-z])\{([^}]*)\}|(?<![\w:\"])(epd_\w+|process_\w+)")
_MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')


def series() -> dict[str, tuple[set[str], tuple[float, ...]]]:
    """Labels and bucket bounds of every series that our processes export, by name."""
    found: dict[str, tuple[set[str], tuple[float, ...]]] = {}
    for module in (stage_metrics, transfer_metrics):
        for value in vars(module).values():
            if not isinstance(value, MetricWrapperBase):
                continue
            name, labels = value._name, set(value._labelnames)
            if isinstance(value, Histogram):
                bounds = tuple(value._kwargs["buckets"])
                found[f"{name}_bucket"] = (labels | {"le"}, bounds)
                found |= {f"{name}_{end}": (labels, ()) for end in ("sum", "count")}
            elif isinstance(value, Counter):
                found[f"{name}_total"] = (labels, ())
            else:
                assert isinstance(value, Gauge)
                found[name] = (labels, ())
    return found


def states() -> set[str]:
    """What the sources give as `what` of epd_state."""
    text = "".join(
        path.read_text()
        for package in ("epd", "encode", "prefill", "decode", "gateway")
        for path in tracked(f"{package}/**.py")
    )
    live = {f"live_{stage}" for stage in ("encode", "prefill", "decode")}
    assert 'f"live_{stage}"' in text
    return set(re.findall(r'"(\w+)": ', text)) | live


def alternatives(operator: str, value: str) -> list[str]:
    """What a matcher names; a pattern in parentheses is spelt out."""
    if operator in ("=", "!="):
        return [value]
    head, _, rest = value.partition("(")
    inner, _, tail = rest.partition(")")
    return [f"{head}{one}{tail}" for one in inner.split("|")] if rest else value.split("|")


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_every_query_asks_for_what_there_is(where: str, expression: str) -> None:
    known, asked = series(), 0
    for name, matchers, bare in _SELECTOR.findall(expression):
        name = name or bare
        asked += 1
        if name in OF_PROCESSES or name in recorded():
            continue
        assert name in known, f"{where}: {name}"
        labels, bounds = known[name]
        for label, operator, value in _MATCHER.findall(matchers):
            assert label in labels | OF_TARGETS, f"{where}: {name} has no label {label}"
            if label == "le":
                assert float(value) in bounds, f"{where}: {value} is no bound of {name}"
                assert value == str(float(value)), "as Python's client writes it"
            if label == "what":
                assert set(alternatives(operator, value)) <= states(), f"{where}: {value}"
    for name in re.findall(r"\bepd:\w+:\w+\b|\bepd:\w+\b", expression):
        asked += 1
        assert name in recorded(), f"{where}: {name} is not recorded"
    assert asked, f"{where}: asks for nothing"


def test_labels_in_texts_are_those_of_the_alert() -> None:
    for rule in rules():
        if "alert" not in rule:
            continue
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "action"}
        by = re.findall(r"\bby \(([\w, ]+)\)", rule["expr"])
        kept = {label.strip() for labels in by for label in labels.split(",")}
        for label in re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]):
            outer = rule["expr"].startswith(("sum by", "min by"))
            assert not outer or label in kept, f"{rule['alert']}: {label} is summed away"


def test_every_alert_has_a_test() -> None:
    tested = re.findall(r"\bEpd\w+", (PROMETHEUS / "epd.rules.test.yaml").read_text())
    assert set(tested) == {rule["alert"] for rule in rules() if "alert" in rule}


def test_autoscalers_ask_for_what_the_adapter_gives() -> None:
    given = {rule["name"]["as"] for rule in yaml.safe_load(ADAPTER.read_text())["rules"]["custom"]}
    asked = set()
    for scaler in objects("HorizontalPodAutoscaler", "components").values():
        for metric in scaler["spec"]["metrics"]:
            assert metric["type"] == "Pods"
            asked.add(metric["pods"]["metric"]["name"])
        down = scaler["spec"]["behavior"]["scaleDown"]
        assert down["stabilizationWindowSeconds"] >= 300
        assert down["policies"] == [
            {"type": "Pods", "value": 1, "periodSeconds": down["policies"][0]["periodSeconds"]}
        ]
    assert asked == given


def test_names_of_alerts_in_the_documents_exist() -> None:
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    text = (ROOT / "docs" / "deployment.md").read_text()
    named = set(re.findall(r"`(Epd[A-Z]\w+)`", text))
    assert named
    assert named <= alerts
