"""The service that is hurt: two gateways, several workers of each stage, each in a node of
its own with certificates, where this machine allows networks; else on loopback."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
import trustme

from bench.service import still_runs
from tests.certificates import Identity
from tests.chaos.wire import Wire
from tests.e2e.cluster import DEMO_CHECKPOINT, GATEWAY, MUST_BE_ZERO, STAGES, Cluster
from tests.e2e.member import Worker, request
from tests.netns import Network, Node, Unavailable
from tests.ports import free_ports
from tests.waiting import LIMIT_S

Result = TypeVar("Result")
GATEWAYS = 2
_LOOKS = 5
NAME = "epd.internal"
SETTINGS = {
    "model.exact": "true",
    "kv.prefill_tokens": "4096",
    "kv.decode_tokens": "4096",
    "limits.request_deadline_s": "30",
    "worker.grace_s": "5",
}
"""`exact`, since an answer may not depend on who else is there; small pools, so that they
run full."""


@dataclass(eq=False)
class Place:
    """A member of the service and what it is hurt through."""

    worker: Worker
    node: Node | None
    wire: Wire | None = None
    hurt: list[tuple[float, float]] = field(default_factory=list)
    """(from, until) of its injuries, by the monotonic clock."""

    @property
    def name(self) -> str:
        return f"{self.worker.role}-{self.worker.index}"

    def was_hurt(self, since: float, until: float) -> bool:
        return any(start <= until and end >= since for start, end in self.hurt)


class Service:
    """`start`, then hurt its `places`; `settle`, `leaks`, `close`.

    Args:
        wired: names of the places whose cable can be slow and lossy.
        settings: configuration of all, beside `SETTINGS`.
    """

    def __init__(
        self,
        folder: Path,
        workers: int = 2,
        wired: Sequence[str] = (),
        rate: str = "1gbit",
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self._settings = SETTINGS | dict(settings or {})
        self.skipped: list[str] = []
        """What this machine doesn't allow, for the report."""
        self._folder = folder
        self.network = self._make_network()
        self.authority = trustme.CA()
        self.identity = Identity(folder / "identity", self.authority, NAME)
        files = self.identity.config(tls_name=NAME)
        self._rpc = {
            f"rpc.{key}": str(getattr(files, key))
            for key in ("tls_cert", "tls_key", "tls_ca", "tls_name")
        }
        self.gateways = [self._place(GATEWAY, index, wired, rate) for index in range(GATEWAYS)]
        self.workers = [
            self._place(stage, index, wired, rate) for stage in STAGES for index in range(workers)
        ]
        self._baseline: dict[str, tuple[int, int]] = {}
        self._files: set[Path] = set()

    def _make_network(self) -> Network | None:
        try:
            return Network()
        except Unavailable as reason:
            self.skipped.append(f"networks, so no cuts, delays and losses: {reason}")
            return None

    def _place(self, role: str, index: int, wired: Sequence[str], rate: str) -> Place:
        node, wire = self._plug(f"{role}-{index}", wired, rate)
        host = node.address if node else "127.0.0.1"
        settings = {"model.path": str(DEMO_CHECKPOINT), "log.level": "info", **self._settings}
        settings |= {f"{key}.host": host for key in ("gateway", "worker", "transfer")} | self._rpc
        settings["gateway.metrics_host"] = host
        log = self._folder / f"{role}-{index}.log"
        environ = os.environ | {"PYTHONUNBUFFERED": "1", "TMPDIR": str(self._tmp())}
        return Place(Worker(role, index, settings, environ, log, node), node, wire)

    def _plug(self, name: str, wired: Sequence[str], rate: str) -> tuple[Node | None, Wire | None]:
        if self.network is None:
            return None, None
        if name in wired:
            node = self.network.node(name, [])
            try:
                wire = Wire(self.network, node)
            except Unavailable as reason:
                self.skipped.append(f"delays and losses: {reason}")
                return self.network.node(f"{name}p"), None
            self.network.shape(node.link(), rate)
            return node, wire
        node = self.network.node(name)
        self.network.shape(node.link(), rate)
        return node, None

    def _tmp(self) -> Path:
        found = self._folder / "tmp"
        found.mkdir(exist_ok=True)
        return found

    @property
    def places(self) -> list[Place]:
        return [*self.gateways, *self.workers]

    def of(self, role: str) -> list[Place]:
        return [place for place in self.places if place.worker.role == role]

    def start(self) -> Service:
        """Start all; returns when both gateways see every worker."""
        addresses = []
        for place in self.gateways:
            host = place.worker.settings["gateway.host"]
            ports = free_ports(3)
            keys = ("membership_port", "http_port", "grpc_port")
            for key, port in zip(keys, ports, strict=True):
                place.worker.settings[f"gateway.{key}"] = str(port)
            addresses.append(f"{host}:{ports[0]}")
        for place in self.workers:
            place.worker.settings["worker.gateways"] = ",".join(addresses)
        for place in self.places:
            place.worker.launch()
        with ThreadPoolExecutor(len(self.places)) as pool:
            list(pool.map(lambda place: place.worker.until_ready(), self.places))
        self.until_complete()
        self._files = set(self._tmp().iterdir())
        for place in self.places:
            # Between two heartbeats there is a task less for a moment.
            if place.worker.role not in self._baseline:
                looks = (_holdings(place.worker) for _ in range(_LOOKS))
                self._baseline[place.worker.role] = max(looks)
        return self

    def until_complete(self, limit_s: float = 60.0) -> None:
        """Until both gateways see every worker alive."""
        deadline = time.monotonic() + limit_s
        while missing := list(self._missing()):
            assert time.monotonic() < deadline, f"not complete: {missing}"
            time.sleep(0.1)

    def _missing(self) -> Iterator[str]:
        wanted = {stage: len(self.of(stage)) for stage in STAGES}
        for place in self.gateways:
            state = request(place.worker.report["http"], "/ready", timeout_s=10).json
            if state["live_workers"] != wanted:
                yield f"{place.name} sees {state['live_workers']}"
        for place in self.workers:
            # The gateway knows it first, and heartbeats are tasks that `leaks` counts.
            if place.worker.memberships < GATEWAYS:
                yield f"{place.name} is registered at {place.worker.memberships}"

    def again(self, place: Place) -> None:
        """Start a member that has ended; returns when it is ready."""
        place.worker.launch()
        place.worker.until_ready()

    def make_whole(self) -> None:
        """For tests that share a service which they hurt: one that failed may have left it so."""
        for place in self.places:
            place.hurt.clear()
            if not place.worker.alive:
                self.again(place)
        self.until_complete()

    def renew(self) -> None:
        """Certificates of the same authority, as an operator renews them."""
        self.identity.renew(self.authority)

    def leaks(self, limit_s: float = LIMIT_S) -> list[str]:
        """What an idle service still holds, when it has had its time."""
        deadline = time.monotonic() + limit_s
        while (found := [line for place in self.places for line in self._leaks(place)]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.3)
        return found

    def _leaks(self, place: Place) -> Iterator[str]:
        worker = place.worker
        state = worker.debug_state()
        for key in MUST_BE_ZERO[worker.role]:
            if state.get(key) != 0:
                yield f"{place.name}: {key} is {state.get(key)}"
        if worker.role != GATEWAY and state.get("integrity") != "ok":
            yield f"{place.name}: {state.get('integrity')}"
        tasks, files = _holdings(worker)
        most_tasks, most_files = self._baseline[worker.role]
        if tasks > most_tasks:
            yield f"{place.name}: {tasks} tasks, {most_tasks} at the start"
        if files > most_files:
            yield f"{place.name}: {files} open files, {most_files} at the start"

    def close(self) -> list[str]:
        """SIGTERM to all; returns what didn't end by itself or left something behind."""
        faults = []
        living = [place for place in self.places if place.worker.alive]
        family = [
            child
            for place in living
            for child in psutil.Process(place.worker.pid).children(recursive=True)
        ]
        for place in living:
            place.worker.send(signal.SIGCONT)
            place.worker.send(signal.SIGTERM)
        for place in living:
            code = place.worker.finish()
            if code != 0:
                faults.append(f"{place.name}: exit code {code}")
        deadline = time.monotonic() + LIMIT_S
        while any(map(still_runs, family)) and time.monotonic() < deadline:
            time.sleep(0.05)
        faults += [f"process left over: {child}" for child in family if still_runs(child)]
        for place in self.places:
            if place.wire is not None:
                place.wire.close()
        if self.network is not None:
            self.network.close()
        left = set(self._tmp().iterdir()) - self._files
        return faults + [f"file left over: {path}" for path in left]


def _holdings(worker: Worker) -> tuple[int, int]:
    """(tasks, open files that are no sockets and pipes)"""
    tasks = int(worker.debug_state()["tasks"])
    targets = map(_target, Path(f"/proc/{worker.pid}/fd").iterdir())
    special = ("socket:", "pipe:", "anon_inode:")
    return tasks, sum(not target.startswith(special) for target in targets)


def _target(entry: Path) -> str:
    try:
        return os.readlink(entry)
    except OSError:
        return "socket:"  # closed meanwhile


def with_cluster(
    settings: Mapping[str, object], work: Callable[[Cluster], Coroutine[Any, Any, Result]]
) -> Result:
    """Run `work` on a service of one worker a stage, started for it and stopped afterwards."""
    with tempfile.TemporaryDirectory(prefix="epd-") as folder:
        cluster = Cluster(Path(folder), settings=settings).start()
        try:
            return asyncio.run(work(cluster))
        finally:
            cluster.close()
