"""A service of real processes for tests: start it, hurt it, look inside, prove it is clean.

`Cluster` starts the stages as `epd serve` does, each with its own log file and, if asked to,
in a node of a network, and keeps what their READY lines say. `assert_clean` is the promise
that every test ends on: no block, lease, stream or task is left in any process.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import psutil

from bench.service import still_runs
from tests.e2e.forks import ROOT
from tests.e2e.member import Reply, Worker, ends, request
from tests.netns import LAN, Node
from tests.ports import free_ports
from tests.waiting import LIMIT_S

DEMO_CHECKPOINT = ROOT / "demo" / "checkpoint"
GATEWAY, STAGES = "gateway", ("encode", "prefill", "decode")

IDLE_LIMIT_S = 60.0
"""What leaks is there for ever; this is only when a test stops looking."""

_WORKER = ("streams", "running", "waiting", "tickets", "leases_open", "leased_bytes")
_MEMORY = ("quarantined_bytes", "reads_parked", "reads_outstanding")
MUST_BE_ZERO = {
    "gateway": ("in_flight", "runs", "teardowns", "streams", "held_bytes", "held_back"),
    "encode": (*_WORKER, *_MEMORY, "arena_bytes_used"),
    "prefill": (*_WORKER, *_MEMORY, "arena_bytes_used", "kv_blocks_used", "background"),
    "decode": (*_WORKER, *_MEMORY, "kv_blocks_used"),
}
"""What /debug/state of an idle process shows as 0 (cached, unreferenced blocks don't count)."""


class Cluster:
    """Gateway and any number of workers on loopback, or each in a node of a network that
    the test can cut; on free ports.

    Args:
        checkpoint: folder of the model.
        counts: processes of each stage; default one each.
        groups: in place of the counts, what each process hosts ("prefill+decode").
        settings: configuration for all, as ``--set`` takes it.
        environ: additional environment by role (``{"encode": {"EPD_FAULTS": ...}}``).
        nodes: where the workers of a role run. Without one they are on loopback, which
            others don't reach: give nodes to all roles, or to none.
        data: the switch that Mooncake uses; gRPC always goes over the LAN.
    """

    def __init__(
        self,
        folder: Path,
        checkpoint: Path = DEMO_CHECKPOINT,
        counts: Mapping[str, int] | None = None,
        groups: Sequence[str] = (),
        settings: Mapping[str, object] | None = None,
        environ: Mapping[str, Mapping[str, str]] | None = None,
        nodes: Mapping[str, Node] | None = None,
        data: str = LAN,
    ) -> None:
        self._folder = folder
        self._settings = {"model.path": str(checkpoint), "log.level": "info"} | {
            key: str(value) for key, value in (settings or {}).items()
        }
        self._environ = environ or {}
        self._nodes = nodes or {}
        self._data = data
        self._idle_tasks: dict[str, int] = {}
        self._never_clean: list[Worker] = []
        counts = dict.fromkeys(STAGES, 1) | dict(counts or {})
        ports = ("http_port", "grpc_port")
        self.gateway = self._worker(GATEWAY, 0, {f"gateway.{port}": "0" for port in ports})
        roles = list(groups) or [stage for stage in STAGES for _ in range(counts[stage])]
        self.workers = [
            self._worker(role, roles[:place].count(role), {}) for place, role in enumerate(roles)
        ]

    def _worker(self, role: str, index: int, settings: dict[str, str]) -> Worker:
        environ = os.environ | {"PYTHONUNBUFFERED": "1"} | dict(self._environ.get(role, {}))
        log = self._folder / f"{role}-{index}.log"
        node = self._nodes.get(role)
        if node is not None:
            keys = ("gateway.host", "gateway.metrics_host", "worker.host")
            hosts = dict.fromkeys(keys, node.address)
            hosts |= {"transfer.host": node.link(self._data).address, "rpc.insecure": "true"}
            settings = settings | hosts
        return Worker(role, index, self._settings | settings, environ, log, node)

    @property
    def members(self) -> list[Worker]:
        return [self.gateway, *self.workers]

    @property
    def pids(self) -> list[int]:
        return [member.pid for member in self.members]

    @property
    def address(self) -> str:
        """ "host:port" of the HTTP API."""
        return str(self.gateway.report["http"])

    @property
    def base_url(self) -> str:
        """What OpenAI's clients take."""
        return f"http://{self.address}/v1"

    @property
    def grpc_address(self) -> str:
        return str(self.gateway.report["grpc"])

    @property
    def model(self) -> str:
        return str(request(self.address, "/v1/models").json["data"][0]["id"])

    def worker(self, role: str, index: int = 0) -> Worker:
        """The process that hosts `role`, among those with the same stages the `index`-th."""
        return next(m for m in self.members if role in m.hosted and m.index == index)

    def start(self) -> Cluster:
        """Start all at once; returns when the gateway says that every stage has a worker."""
        (port,) = free_ports()
        self.gateway.settings["gateway.membership_port"] = str(port)
        for worker in self.workers:
            host = self.gateway.node.address if self.gateway.node else "127.0.0.1"
            worker.settings["worker.gateways"] = f"{host}:{port}"
        for member in self.members:
            member.launch()
        with ThreadPoolExecutor(len(self.members)) as pool:
            list(pool.map(Worker.until_ready, self.members))
        self._until_complete()
        self._idle_tasks = self._settled()
        return self

    def _settled(self, limit_s: float = LIMIT_S) -> dict[str, int]:
        """Tasks of each process, once it knows itself that it is registered: the gateway
        knows it first, and heartbeats are tasks, too."""
        deadline = time.monotonic() + limit_s
        before: dict[str, int] = {}
        while True:
            registered = all(worker.memberships for worker in self.workers)
            tasks = {member.role: member.debug_state()["tasks"] for member in self.members}
            if registered and tasks == before:
                return tasks
            assert time.monotonic() < deadline, f"not settled: {tasks}"
            before = tasks
            time.sleep(0.1)

    def until_serving(self, limit_s: float = LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while (reply := request(self.address, "/ready", timeout_s=LIMIT_S)).status != 200:
            assert time.monotonic() < deadline, f"not ready: {reply.body.decode()}"
            time.sleep(0.05)

    def _until_complete(self, limit_s: float = LIMIT_S) -> None:
        """Until every worker has joined: its tasks are those of an idle one."""
        deadline = time.monotonic() + limit_s
        while not self._complete():
            assert time.monotonic() < deadline, f"not all of {dict(self._hosted)} have joined"
            time.sleep(0.05)

    def _complete(self) -> bool:
        joined = request(self.address, "/ready", timeout_s=LIMIT_S).json["live_workers"]
        return bool(joined == self._hosted)

    @property
    def _hosted(self) -> Counter[str]:
        """How many workers each stage has when all are there."""
        return Counter(stage for worker in self.workers for stage in worker.role.split("+"))

    def restart(self, role: str, index: int = 0) -> Worker:
        """Start a worker that has ended again; returns when the gateway uses it."""
        worker = self.worker(role, index)
        assert not worker.alive, f"{role} still runs"
        worker.launch()
        worker.until_ready()
        self.until_serving()
        return worker

    def make_whole(self, limit_s: float = LIMIT_S) -> None:
        """For tests that share a service: one that failed may have left it with processes that
        have ended, that are about to, or that hold for ever what `assert_clean` found."""
        for member in self._never_clean:
            if member.alive:
                member.end(signal.SIGKILL)
        self._never_clean = []
        deadline = time.monotonic() + limit_s
        while not self._all_alive():
            assert time.monotonic() < deadline, "not whole again"
            time.sleep(0.05)

    def _all_alive(self) -> bool:
        """Whether all workers have joined, after those that have ended were started again."""
        for member in self.members:
            if not member.alive:
                member.launch()
                member.until_ready()
        try:
            return self._complete()
        except OSError:  # the gateway was told to stop, and does
            return False

    @contextmanager
    def paused(self, role: str, index: int = 0) -> Iterator[Worker]:
        """A process that is stopped (SIGSTOP): its connections live, it answers nothing."""
        worker = self.worker(role, index)
        worker.send(signal.SIGSTOP)
        try:
            yield worker
        finally:
            worker.send(signal.SIGCONT)

    def chat(self, body: Mapping[str, Any], timeout_s: float = 60.0) -> Reply:
        """POST /v1/chat/completions with the served model unless the body names one."""
        return request(
            self.address, "/v1/chat/completions", {"model": self.model} | dict(body), timeout_s
        )

    def unclean(self) -> dict[Worker, list[str]]:
        """What is not idle right now, by process."""
        found = {member: self._left_over(member) for member in self.members if member.alive}
        return {member: lines for member, lines in found.items() if lines}

    def _left_over(self, member: Worker) -> list[str]:
        state, name = member.debug_state(), f"{member.role}-{member.index}"
        found = [
            f"{name}: {key} is {counts.get(key)}"
            for role, counts in state.get("stages", {member.role: state}).items()
            for key in MUST_BE_ZERO[role]
            if counts.get(key) != 0
        ]
        if (more := state["tasks"] - self._idle_tasks[member.role]) > 0:
            found.append(f"{name}: {more} tasks more than at the start")
        if member.role != GATEWAY and state.get("integrity") != "ok":
            found.append(f"{name}: {state.get('integrity')}")
        return found

    def assert_clean(self, limit_s: float = IDLE_LIMIT_S) -> None:
        """No block, lease, stream or task is left anywhere, at the latest after `limit_s`."""
        deadline = time.monotonic() + limit_s
        while found := self.unclean():
            self._never_clean = list(found) if time.monotonic() > deadline else []
            assert not self._never_clean, f"left over: {'; '.join(chain(*found.values()))}"
            time.sleep(0.1)

    def close(self) -> None:
        """SIGTERM to all that live; every one must end by itself, and leave no process."""
        family = [
            child
            for member in self.members
            if member.alive
            for child in psutil.Process(member.pid).children(recursive=True)
        ]
        living = [member for member in self.members if member.alive]
        for member in living:
            member.send(signal.SIGCONT)
            member.send(signal.SIGTERM)
        stubborn = [member.role for member in living if not ends(member)]
        codes = {member.role: member.process.returncode for member in living if member.process}
        # Helper processes see the end of their parent, and need a moment for their own.
        deadline = time.monotonic() + LIMIT_S
        while (left := [process for process in family if still_runs(process)]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.05)
        assert not stubborn, f"did not stop after SIGTERM: {stubborn}"
        assert not left, f"processes left over: {left}"
        assert set(codes.values()) <= {0}, f"exit codes: {codes}"
