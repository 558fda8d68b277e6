"""One process of a service for tests: started, asked over HTTP, hurt, ended."""

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
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

from epd.child import READY_PREFIX, command_line
from epd.forkserver import Process
from epd.lifetime import expect_parent
from tests.e2e.forks import ROOT, start
from tests.netns import Node
from tests.waiting import LIMIT_S

START_LIMIT_S = 200.0


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
    def text(self) -> str:
        """What the model said in a chat."""
        assert self.status == 200, (self.status, self.body[:300])
        return str(self.json["choices"][0]["message"]["content"])

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


def ends(member: Worker, limit_s: float = LIMIT_S) -> bool:
    """Whether it ends by itself; killed, with its children, if it takes longer."""
    assert member.process is not None
    try:
        member.process.wait(limit_s)
        return True
    except subprocess.TimeoutExpired:
        os.killpg(member.pid, signal.SIGKILL)
        member.process.wait()
        return False
