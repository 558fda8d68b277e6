"""The files in deploy/ are held to the code: settings, ports, probes, times, who reaches whom."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from epd.cli import app
from epd.config import Config, LimitsConfig
from epd.config_sources import load_config
from tests import deployed
from tests.deployed import (
    BASE,
    COMPONENT,
    DEPLOY,
    KUBERNETES,
    ROLES,
    allowed,
    container,
    objects,
    pod,
    selected,
)
from tests.tracked import ROOT

KINDS = {
    ("v1", "Service"),
    ("v1", "Namespace"),
    ("v1", "PersistentVolumeClaim"),
    ("apps/v1", "Deployment"),
    ("policy/v1", "PodDisruptionBudget"),
    ("networking.k8s.io/v1", "NetworkPolicy"),
    ("autoscaling/v2", "HorizontalPodAutoscaler"),
    ("cert-manager.io/v1", "Issuer"),
    ("cert-manager.io/v1", "Certificate"),
}
CLOSE_S = 20
"""What a process may take behind its grace: `_CLOSE_S` of a gateway, a running step."""


def config_of(part: deployed.Part, folder: Path) -> Config:
    path = folder / "epd.toml"
    path.write_text(part.config)
    return load_config(path, {}, part.environ)


@pytest.fixture
def configs(tmp_path: Path) -> dict[str, Config]:
    return {role: config_of(deployed.in_kubernetes(role), tmp_path) for role in ROLES}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("of", [deployed.in_kubernetes, deployed.in_systemd])
def test_every_command_and_setting_is_taken(of: Any, role: str, tmp_path: Path) -> None:
    part = of(role)
    assert part.arguments == (role,)
    command: Any = get_command(app)
    assert role in command.commands
    ours = {key for key in part.environ if key.startswith("EPD_")}
    assert {key for key in ours if "__" not in key} == {"EPD_CONFIG"}
    config = config_of(part, tmp_path)
    assert config.rpc.tls_name, "pods and machines are dialled by address"
    assert not config.rpc.insecure
    if role != "gateway":
        assert config.worker.host == config.transfer.host != "127.0.0.1"
        assert config.worker.gateways
        assert config.model.threads > 1


def test_keys_come_out_of_a_secret(tmp_path: Path, configs: dict[str, Config]) -> None:
    assert configs["gateway"].gateway.api_keys == ()
    part = deployed.in_kubernetes("gateway", secrets={"epd-api-keys": "one,two"})
    assert config_of(part, tmp_path).gateway.api_keys == ("one", "two")


def test_kubernetes_and_systemd_agree_on_ports(tmp_path: Path, configs: dict[str, Config]) -> None:
    for role in ROLES:
        ours, theirs = configs[role], config_of(deployed.in_systemd(role), tmp_path)
        for section in ("gateway", "worker", "transfer"):
            one, other = getattr(ours, section), getattr(theirs, section)
            for key in type(one).model_fields:
                if "port" in key or key == "grace_s":
                    assert getattr(one, key) == getattr(other, key), f"{section}.{key}"


def test_objects_are_of_kinds_that_we_know() -> None:
    found = {(each["apiVersion"], each["kind"]) for each in deployed.documents()}
    assert found == KINDS


def test_kustomize_takes_every_file() -> None:
    for path in KUBERNETES.rglob("kustomization.yaml"):
        here = yaml.safe_load(path.read_text())
        listed = [*here.get("resources", []), *here.get("components", [])]
        listed += [name for each in here.get("configMapGenerator", []) for name in each["files"]]
        for name in listed:
            assert (path.parent / name).exists(), f"{path}: {name}"
        forgotten = {each.name for each in path.parent.glob("*.*")} - set(listed)
        assert forgotten <= {"kustomization.yaml", "adapter-rules.yaml"}


def ports_of(role: str) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container(role)["ports"]}


def test_ports_are_those_of_the_configuration(configs: dict[str, Config]) -> None:
    gateway = configs["gateway"].gateway
    wanted = {name: getattr(gateway, f"{name}_port") for name in ("http", "grpc", "membership")}
    assert ports_of("gateway") == wanted | {"metrics": gateway.metrics_port}
    for role in ROLES[1:]:
        worker = configs[role].worker
        assert ports_of(role) == {"rpc": worker.port, "metrics": worker.metrics_port}
        (address,) = worker.gateways
        service = objects("Service")[address.rpartition(":")[0]]
        (membership,) = service["spec"]["ports"]
        assert address.endswith(f":{membership['port']}")
        assert membership["port"] == 8002
    for service in objects("Service").values():
        role = service["spec"]["selector"][COMPONENT]
        for port in service["spec"]["ports"]:
            assert ports_of(role)[port["targetPort"]] == port["port"]


def test_workers_find_gateways_that_are_not_ready() -> None:
    """No gateway is ready before it has workers: else neither would ever find the other."""
    spec = objects("Service")["epd-membership"]["spec"]
    assert spec["clusterIP"] == "None"
    assert spec["publishNotReadyAddresses"] is True


def test_policies_open_what_is_needed_and_nothing_else(configs: dict[str, Config]) -> None:
    low, high = configs["encode"].transfer.port_range
    gateway, worker = configs["gateway"].gateway, configs["encode"].worker
    wanted = {("", "gateway", gateway.http_port), ("", "gateway", gateway.grpc_port)}
    wanted.add(("*", "gateway", gateway.metrics_port))
    for stage in ROLES[1:]:
        wanted.add((stage, "gateway", gateway.membership_port))
        wanted.add(("gateway", stage, worker.port))
        wanted.add(("*", stage, worker.metrics_port))
    for number in range(low, high + 1):
        wanted |= {("prefill", "encode", number), ("decode", "prefill", number)}
    assert allowed() == wanted
    for policy in objects("NetworkPolicy").values():
        assert "Ingress" in policy["spec"]["policyTypes"] or policy["metadata"]["name"] == (
            "epd-kv-readers"
        )


def test_what_may_leave_is_what_is_let_in() -> None:
    leaving = set()
    for policy in objects("NetworkPolicy").values():
        for rule in policy["spec"].get("egress", []):
            if "to" not in rule:
                assert {port["port"] for port in rule["ports"]} == {53}
                continue
            for port in rule["ports"]:
                for who in selected({"podSelector": policy["spec"]["podSelector"]}):
                    for peer in rule["to"]:
                        leaving |= {(who, whom, port["port"]) for whom in selected(peer)}
    firsts = {(who, whom, port) for who, whom, port in allowed() if port <= 15000}
    assert leaving == {edge for edge in firsts if edge[0] in ROLES}


@pytest.mark.parametrize("role", ROLES)
def test_probes_ask_what_they_should(role: str, configs: dict[str, Config]) -> None:
    probes = {
        kind: container(role)[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")
    }
    assert {kind: probe["httpGet"]["path"] for kind, probe in probes.items()} == {
        "startup": "/health",
        "readiness": "/ready",
        "liveness": "/health",  # a busy or draining process is not to be killed
    }
    assert {probe["httpGet"]["port"] for probe in probes.values()} == {"metrics"}
    kills_after = probes["liveness"]["periodSeconds"] * probes["liveness"]["failureThreshold"]
    assert kills_after > configs[role].worker.wedged_s, "it ends by itself, and says why"


@pytest.mark.parametrize("role", ROLES)
def test_graces_fit_into_what_follows_sigterm(role: str, configs: dict[str, Config]) -> None:
    grace_s = configs[role].worker.grace_s
    stop = container(role).get("lifecycle", {}).get("preStop")
    wait_s = float(stop["exec"]["command"][1]) if stop else 0.0
    assert (wait_s > 0) == (role == "gateway"), "workers tell the gateways themselves"
    assert pod(role)["terminationGracePeriodSeconds"] >= wait_s + grace_s + CLOSE_S
    (most,) = deployed.unit()["TimeoutStopSec"]
    assert float(most) >= grace_s + CLOSE_S
    if role in ("gateway", "decode"):
        assert grace_s >= LimitsConfig().request_deadline_s, "an answer would be cut"


@pytest.mark.parametrize("role", ROLES)
def test_pods_are_locked_down(role: str) -> None:
    spec, of = pod(role), container(role)
    assert spec["enableServiceLinks"] is False, "EPD_* variables of other services"
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert of["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounts = {mount["mountPath"]: mount for mount in of["volumeMounts"]}
    writable = {path for path, mount in mounts.items() if not mount.get("readOnly")}
    assert writable == {"/tmp", "/var/cache/epd"}
    assert {mount["name"] for mount in mounts.values()} == {v["name"] for v in spec["volumes"]}
    config = deployed.in_kubernetes(role).config
    assert f'"{next(path for path in mounts if path.startswith("/models"))}"' in config
    assert "subPath" not in mounts["/etc/epd/tls"], "it would never be renewed"
    for name in ("tls.crt", "tls.key", "ca.crt"):
        assert f'"/etc/epd/tls/{name}"' in config
    assert of["resources"]["limits"] == {"memory": of["resources"]["requests"]["memory"]}


def test_selectors_select() -> None:
    for role in ROLES:
        spec = objects("Deployment")[f"epd-{role}"]["spec"]
        own = {COMPONENT: role}
        assert spec["selector"]["matchLabels"] == own
        assert own.items() <= spec["template"]["metadata"]["labels"].items()
        assert objects("PodDisruptionBudget")[f"epd-{role}"]["spec"]["selector"] == {
            "matchLabels": own
        }
        (spread,) = spec["template"]["spec"]["topologySpreadConstraints"]
        assert spread["labelSelector"]["matchLabels"] == own
    for name, scaler in objects("HorizontalPodAutoscaler", "components").items():
        assert scaler["spec"]["scaleTargetRef"]["name"] == name
        assert name in objects("Deployment")


def test_the_certificate_is_for_the_name_that_is_asked_for(configs: dict[str, Config]) -> None:
    certificates = objects("Certificate", "components")
    leaf = certificates["epd-tls"]["spec"]
    assert leaf["dnsNames"] == [configs["gateway"].rpc.tls_name]
    assert {"server auth", "client auth"} <= set(leaf["usages"])
    (volume,) = [v for v in pod("gateway")["volumes"] if v["name"] == "tls"]
    assert volume["secret"]["secretName"] == leaf["secretName"]


def test_the_unit_ends_only_its_main_process_by_signal() -> None:
    lines = {key: values[-1] for key, values in deployed.unit().items()}
    assert lines["Type"] == "notify"
    assert lines["KillMode"] == "mixed", "helpers are needed while it drains"
    assert lines["OOMPolicy"] == "continue"
    assert lines["RestartPreventExitStatus"] == "2"
    assert lines["ProtectSystem"] == "strict"
    assert "MemoryDenyWriteExecute" not in lines, "oneDNN writes code"


def test_the_image_is_made_of_what_the_project_is() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    makefile = (ROOT / "Makefile").read_text()
    (torch,) = re.findall(r"^ARG TORCH=(\S+)$", text, re.MULTILINE)
    torch = torch.removesuffix("+cpu")
    assert f"TORCH  ?= {torch}\n" in makefile
    assert f"\n{torch}\n" in (ROOT / "constraints.txt").read_text()
    copied = set(re.findall(r"^COPY (\w+) \1$", text, re.MULTILINE))
    assert copied == {"protos", "epd", *ROLES}
    for name in re.findall(r"^COPY ([\w. ]+) \./$", text, re.MULTILINE):
        assert all((ROOT / each).is_file() for each in name.split())
    user = re.findall(r"^USER (\d+):(\d+)$", text, re.MULTILINE)
    context = pod("gateway")["securityContext"]
    assert user == [(str(context["runAsUser"]), str(context["runAsGroup"]))]
    assert 'ENTRYPOINT ["epd"]' in text
    assert (BASE / "epd.toml").is_file()
