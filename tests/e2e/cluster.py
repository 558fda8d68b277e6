"""A service of real processes for tests: start it, hurt it, look inside, prove it is clean.

`Cluster` starts the stages as `epd serve` does, each with its own log file and, if asked to,
in a node of a network, and keeps what their READY lines say. `assert_clean` is the promise
that every test ends on: no block, lease, stream or task is left in any process.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

import psutil

from epd.child import READY_PREFIX, command_line
from epd.forkserver import Process
from epd.lifetime import expect_parent
from tests.e2e.forks import ROOT, start
from tests.netns import LAN, Node
from tests.ports import free_ports
from tests.waiting import LIMIT_S

DEMO_CHECKPOINT = ROOT / "demo" / "checkpoint"
GATEWAY, STAGES = "gateway", ("encode", "prefill", "decode")

START_LIMIT_S = 200.0
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


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer, read to its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    seconds: float

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's error object."""
        error = self.json["error"]
        assert isinstance(error, dict)
        return error


def request(
    address: str, path: str, body: Any = None, timeout_s: float = 60.0, raw: bytes | None = None
) -> Reply:
    """GET, or POST when there is a body; never raises for a status."""
    started = time.monotonic()
    connection = http.client.HTTPConnection(address, timeout=timeout_s)
    data = raw if raw is not None else None if body is None else json.dumps(body).encode()
    method = "GET" if data is None else "POST"
    try:
        connection.request(method, path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = response.read()
        headers = {key.lower(): value for key, value in response.getheaders()}
        return Reply(response.status, headers, content, time.monotonic() - started)
    finally:
        connection.close()


@dataclass(eq=False)
class Worker:
    """One process of the cluster, over its restarts."""

    role: str
    index: int
    settings: dict[str, str]
    environ: dict[str, str]
    log: Path
    node: Node | None = None
    """Where it runs; None: on this machine itself."""
    process: subprocess.Popen[str] | Process | None = None
    report: dict[str, Any] = field(default_factory=dict)
    _lines: queue.Queue[str | None] = field(default_factory=queue.Queue)

    @property
    def hosted(self) -> tuple[str, ...]:
        """The stages in this process and, of several, the name of them all."""
        stages = self.role.split("+")
        return (self.role, *stages) if len(stages) > 1 else (self.role,)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def launch(self) -> None:
        self._lines = queue.Queue()
        with self.log.open("a") as log:
            self.process, stdout = self._start(log)
        reader = threading.Thread(target=_read, args=(stdout, self._lines), daemon=True)
        reader.start()

    @property
    def line(self) -> list[str]:
        """The command that starts it, where it runs."""
        line = command_line(self.role, self.settings)
        return self.node.module(line) if self.node else line

    def _start(self, log: TextIO) -> tuple[subprocess.Popen[str] | Process, TextIO]:
        # What CUDA is told before a fork it doesn't know after it.
        if self.settings.get("model.device", "cpu") == "cpu":
            return start(self.line, self.environ, log.fileno())
        process = subprocess.Popen(
            self.line,
            cwd=ROOT,
            env=expect_parent(self.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            process_group=0,
        )
        assert isinstance(process.stdout, TextIOWrapper)
        return process, process.stdout

    def until_ready(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"{self.role} is not ready:\n{self.last_words()}") from None
            if line is None:
                raise AssertionError(f"{self.role} ended:\n{self.last_words()}")
            if line.startswith(READY_PREFIX):
                self.report = json.loads(line.removeprefix(READY_PREFIX))
                return

    def last_words(self) -> str:
        return "\n".join(self.log.read_text().splitlines()[-30:])

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def end(self, number: int = signal.SIGTERM, limit_s: float = LIMIT_S) -> int:
        """Signal and wait; returns the exit code."""
        assert self.process is not None
        self.send(number)
        return self.process.wait(limit_s)

    def finish(self, limit_s: float = LIMIT_S) -> int:
        """Wait for the end; the exit code. Killed, with its children, if it takes longer."""
        assert self.process is not None
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)
            return self.process.wait()

    def debug_state(self) -> dict[str, Any]:
        reply = request(self.report["metrics"], "/debug/state", timeout_s=LIMIT_S)
        assert reply.status == 200, reply
        state = reply.json
        assert isinstance(state, dict)
        return state

    @property
    def memberships(self) -> int:
        """Gateways that a worker is registered at, as it sees it."""
        found = re.search(r"^epd_memberships\{[^}]*\} (\d+)", self.metrics(), re.MULTILINE)
        return int(found[1]) if found else 0

    def metrics(self) -> str:
        return request(self.report["metrics"], "/metrics", timeout_s=LIMIT_S).body.decode()


def _read(stdout: TextIO, lines: queue.Queue[str | None]) -> None:
    """Its own queue: children may keep a dead process's output open until after its restart."""
    for line in stdout:
        lines.put(line)
    lines.put(None)


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
        hosted = Counter(stage for worker in self.workers for stage in worker.role.split("+"))
        deadline = time.monotonic() + limit_s
        while request(self.address, "/ready", timeout_s=LIMIT_S).json["live_workers"] != hosted:
            assert time.monotonic() < deadline, f"not all of {dict(hosted)} have joined"
            time.sleep(0.05)

    def restart(self, role: str, index: int = 0) -> Worker:
        """Start a worker that has ended again; returns when the gateway uses it."""
        worker = self.worker(role, index)
        assert not worker.alive, f"{role} still runs"
        worker.launch()
        worker.until_ready()
        self.until_serving()
        return worker

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

    def unclean(self) -> list[str]:
        """What is not idle right now, by process."""
        found = []
        for member in self.members:
            if not member.alive:
                continue
            state = member.debug_state()
            for role, counts in state.get("stages", {member.role: state}).items():
                for key in MUST_BE_ZERO[role]:
                    if counts.get(key) != 0:
                        found.append(f"{member.role}-{member.index}: {key} is {counts.get(key)}")
            if state["tasks"] > self._idle_tasks[member.role]:
                more = state["tasks"] - self._idle_tasks[member.role]
                found.append(f"{member.role}-{member.index}: {more} tasks more than at the start")
            if member.role != GATEWAY and state.get("integrity") != "ok":
                found.append(f"{member.role}-{member.index}: {state.get('integrity')}")
        return found

    def assert_clean(self, limit_s: float = IDLE_LIMIT_S) -> None:
        """No block, lease, stream or task is left anywhere, at the latest after `limit_s`."""
        deadline = time.monotonic() + limit_s
        while found := self.unclean():
            assert time.monotonic() < deadline, "left over: " + "; ".join(found)
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
        stubborn = [member.role for member in living if not _ends(member)]
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


def _ends(member: Worker, limit_s: float = LIMIT_S) -> bool:
    assert member.process is not None
    try:
        member.process.wait(limit_s)
        return True
    except subprocess.TimeoutExpired:
        os.killpg(member.pid, signal.SIGKILL)
        member.process.wait()
        return False


def still_runs(process: psutil.Process) -> bool:
    """False for one that is dead and only waits to be collected by init."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
