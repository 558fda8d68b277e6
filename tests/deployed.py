"""What the files in deploy/ start: commands, environments and configurations, as data."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.tracked import ROOT

DEPLOY = ROOT / "deploy"
KUBERNETES, SYSTEMD, PROMETHEUS = (DEPLOY / n for n in ("kubernetes", "systemd", "prometheus"))
BASE = KUBERNETES / "base"
RULES = PROMETHEUS / "epd.rules.yaml"
ADAPTER = KUBERNETES / "components" / "autoscaling" / "adapter-rules.yaml"
COMPONENT = "app.kubernetes.io/component"
ROLES = ("gateway", "encode", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class Part:
    """How one process is started."""

    role: str
    arguments: tuple[str, ...]
    """Behind `epd`."""
    environ: Mapping[str, str]
    config: str
    """Text of the file that EPD_CONFIG names."""


def documents(folder: str = ".") -> Iterator[dict[str, Any]]:
    """Every Kubernetes object in a folder of deploy/kubernetes, as written; all see the same
    ones, so nobody may change them."""
    for path in sorted((KUBERNETES / folder).rglob("*.yaml")):
        yield from _documents_in(path)


@cache
def _documents_in(path: Path) -> tuple[dict[str, Any], ...]:
    """Read once: every question about a pod comes here, and parsing YAML is slow."""
    return tuple(
        document
        for document in yaml.safe_load_all(path.read_text())
        if "apiVersion" in document and not document["apiVersion"].startswith("kustomize")
    )


def objects(kind: str, folder: str = "base") -> dict[str, dict[str, Any]]:
    """By name."""
    found = [each for each in documents(folder) if each["kind"] == kind]
    return {each["metadata"]["name"]: each for each in found}


def pod(role: str) -> dict[str, Any]:
    """The pod's spec of a Deployment."""
    spec: dict[str, Any] = objects("Deployment")[f"epd-{role}"]["spec"]["template"]["spec"]
    return spec


def container(role: str) -> dict[str, Any]:
    (only,) = pod(role)["containers"]
    assert isinstance(only, dict)
    return only


def in_kubernetes(
    role: str, address: str = "10.1.2.3", cpus: str = "", secrets: Mapping[str, str] | None = None
) -> Part:
    """A pod with this address; `cpus` is what an overlay requests in place of ours, `secrets`
    those that there are."""
    of = container(role)
    requests = of["resources"]["requests"]
    references = {"status.podIP": address, "requests.cpu": cpus or requests["cpu"]}
    references |= secrets or {}
    given = {entry["name"]: _value(entry, references) for entry in of["env"]}
    environ = {key: value for key, value in given.items() if value is not None}
    assert "command" not in of, "the image's entry point is epd"
    return Part(role, tuple(of["args"]), environ, (BASE / "epd.toml").read_text())


def _value(entry: Mapping[str, Any], references: Mapping[str, str]) -> str | None:
    """None: it is out of a Secret that isn't there, and needn't be."""
    if "value" in entry:
        return str(entry["value"])
    (source,) = entry["valueFrom"].values()
    if source.get("optional"):
        return references.get(source["name"])
    return references[source.get("fieldPath") or source["resource"]]


def allowed() -> set[tuple[str, str, int]]:
    """(who, whom, port) that the policies let in; "": anybody, "*": other namespaces."""
    found = set()
    for policy in objects("NetworkPolicy").values():
        for rule in policy["spec"].get("ingress", []):
            peers = [p for peer in rule.get("from", [{}]) for p in selected(peer)]
            for port in rule["ports"]:
                last = port.get("endPort", port["port"])
                for number in range(port["port"], last + 1):
                    for whom in selected({"podSelector": policy["spec"]["podSelector"]}):
                        found |= {(who, whom, number) for who in peers}
    return found


def selected(peer: dict[str, Any]) -> list[str]:
    """Roles of the pods that a peer of a policy stands for."""
    if not peer:
        return [""]
    if "namespaceSelector" in peer:
        return ["*"]
    wanted = peer["podSelector"]["matchLabels"].items()
    labels = {role: _labels(role).items() for role in ROLES}
    matching = [role for role in ROLES if wanted <= labels[role]]
    assert matching, f"{peer} selects nothing"
    return matching


def _labels(role: str) -> dict[str, str]:
    template = objects("Deployment")[f"epd-{role}"]["spec"]["template"]
    labels: dict[str, str] = template["metadata"]["labels"]
    return labels


def unit() -> dict[str, list[str]]:
    """The lines of epd@.service, by key."""
    found: dict[str, list[str]] = {}
    for line in (SYSTEMD / "epd@.service").read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def in_systemd(role: str) -> Part:
    """epd@ROLE, with the example files."""
    lines = unit()
    program, *arguments = shlex.split(lines["ExecStart"][0].replace("%i", role))
    assert program == "/opt/epd/bin/epd"
    assert lines["EnvironmentFile"] == ["/etc/epd/%i.env"]
    given = (SYSTEMD / f"{role}.env").read_text().splitlines()
    pairs = [line for line in given if line and not line.startswith("#")]
    environ = dict(pair.split("=", 1) for pair in [*lines["Environment"], *pairs])
    return Part(role, tuple(arguments), environ, (SYSTEMD / "epd.toml").read_text())


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def recorded() -> set[str]:
    return {rule["record"] for rule in rules() if "record" in rule}


def expressions() -> Iterator[tuple[str, str]]:
    """(where, PromQL)"""
    for rule in rules():
        yield rule.get("alert") or rule["record"], rule["expr"]
    for rule in yaml.safe_load(ADAPTER.read_text())["rules"]["custom"]:
        yield rule["name"]["as"], rule["seriesQuery"]
        yield rule["name"]["as"], rule["metricsQuery"]
    for path in PROMETHEUS.glob("*.json"):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", []):
                yield f"{path.name}: {panel['title']}", target["expr"]
