"""Processes started as the files in deploy/ say, each in a network node and locked up.

What is changed of those files: their paths lead into the test's folder, addresses are those of
the nodes, one thread each (as an overlay that requests one CPU would have it), and the batch-
invariant arithmetic that lets answers be compared.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import trustme

from tests import deployed
from tests.certificates import Identity
from tests.e2e.cluster import DEMO_CHECKPOINT
from tests.e2e.member import Worker
from tests.netns import Network, Node

OVERLAY = {"EPD_MODEL__EXACT": "true"}


@dataclass(eq=False)
class Pod(Worker):
    """One process; `part` is how it is started."""

    part: deployed.Part | None = None
    folder: Path = field(default_factory=Path)

    @property
    def line(self) -> list[str]:
        assert self.node is not None
        assert self.part is not None
        _, _, _, namespace, *_ = self.node.module([sys.executable, "-m", ""])
        place = ["tests.in_pod", namespace, str(self.folder)]
        return [sys.executable, "-m", *place, "epd.cli", *self.part.arguments]

    def until_ready(self) -> None:
        """Addresses are the node's, as from outside."""
        super().until_ready()
        assert self.node is not None
        for name, value in self.report.items():
            if isinstance(value, str):
                self.report[name] = value.replace("0.0.0.0", self.node.address)


class Pods:
    """What a cluster gives its pods: addresses, names, certificates."""

    def __init__(self, folder: Path, network: Network) -> None:
        self._folder = folder
        self._network = network
        self._numbers = dict.fromkeys(deployed.ROLES, 0)
        self.nodes: dict[str, list[Node]] = {role: [] for role in deployed.ROLES}
        identity = Identity(folder / "tls", trustme.CA(), "epd.internal")
        for ours, theirs in (("cert", "tls.crt"), ("key", "tls.key"), ("ca", "ca.crt")):
            (identity.folder / theirs).symlink_to(ours)

    def plan(self, counts: Mapping[str, int]) -> None:
        """Nodes for so many pods of each role."""
        for role, count in counts.items():
            names = [f"{role}-{index}" for index in range(count)]
            self.nodes[role] = [self._network.node(name) for name in names]

    def add(self, part: deployed.Part, own: Mapping[str, str]) -> Pod:
        """The next pod of a role; `own` replaces texts in its files and environment."""
        role, index = part.role, self._numbers[part.role]
        self._numbers[role] += 1
        node, folder = self.nodes[role][index], self._folder / f"{role}-{index}"
        (folder / "tmp").mkdir(parents=True)
        names = [f"{gateway.address} epd-membership" for gateway in self.nodes["gateway"]]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        paths = {"/etc/epd/epd.toml": str(folder / "epd.toml")}
        paths["/etc/epd/tls"] = str(self._folder / "tls")
        paths |= dict.fromkeys(("/models/checkpoint", "/srv/epd/checkpoint"), str(DEMO_CHECKPOINT))
        paths |= own
        (folder / "epd.toml").write_text(_replaced(part.config, paths))
        environ = {key: _replaced(value, paths) for key, value in part.environ.items()}
        writable = {"TMPDIR": str(folder / "tmp"), "XDG_CACHE_HOME": str(_cache())}
        everything = os.environ | {"PYTHONUNBUFFERED": "1"} | environ | writable | OVERLAY
        log = self._folder / f"{role}-{index}.log"
        return Pod(role, index, {}, everything, log, node, part=part, folder=folder)

    def dialled(self) -> set[tuple[str, str, int]]:
        """(who, whom, port) of the connections that there are between pods."""
        roles = {node.address: role for role, nodes in self.nodes.items() for node in nodes}
        found = set()
        for node in (node for nodes in self.nodes.values() for node in nodes):
            shown = subprocess.run(
                node.command(["ss", "-Htn", "state", "established"]),
                capture_output=True, text=True, check=True,
            ).stdout  # fmt: skip
            for line in shown.splitlines():
                ours, theirs = (_address(field) for field in line.split()[2:4])
                # Clients' ports are the kernel's, from 32768 on.
                if theirs[0] in roles and ours[1] < 32768:
                    found.add((roles[theirs[0]], roles[node.address], ours[1]))
        return found

    def in_kubernetes(self, role: str) -> Pod:
        address = self.nodes[role][self._numbers[role]].address
        return self.add(deployed.in_kubernetes(role, address, cpus="1"), {})

    def in_systemd(self, role: str) -> Pod:
        """Machines 10.0.0.1 to 4 are the nodes, in the order of the roles."""
        machines = {
            f"10.0.0.{number}": self.nodes[each][0].address
            for number, each in enumerate(deployed.ROLES, start=1)
        }
        part = deployed.in_systemd(role)
        threads = {"EPD_MODEL__THREADS": "1"} if role != "gateway" else {}
        part = deployed.Part(role, part.arguments, dict(part.environ) | threads, part.config)
        return self.add(part, machines)


def _replaced(text: str, replacements: Mapping[str, str]) -> str:
    for old, new in replacements.items():
        text = text.replace(old, new)
    return text


def launched(pods: Sequence[Pod]) -> None:
    """Start them at once; returns when each says READY."""
    for pod in pods:
        pod.launch()
    for pod in pods:
        pod.until_ready()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host.strip("[]").removeprefix("::ffff:"), int(port)


def _cache() -> Path:
    """That of all tests: kernels take long to compile."""
    found = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    found.mkdir(parents=True, exist_ok=True)
    return found
