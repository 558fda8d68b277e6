"""The three stages as processes of their own, without a gateway."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.forks import start
from tests.waiting import LIMIT_S

STAGES = ("encode", "prefill", "decode")


class StageProcess:
    """One stage; use as a context manager. Its log is kept for a failing test."""

    def __init__(
        self, stage: str, checkpoint: Path, log: Path, faults: str = "", **settings: Any
    ) -> None:
        flags = [f"--set={key.replace('__', '.')}={value}" for key, value in settings.items()]
        self._log = log
        command = [sys.executable, "-m", "epd.cli", stage, str(checkpoint), *flags]
        environ = os.environ | {"OMP_NUM_THREADS": "1", "EPD_FAULTS": faults}
        with log.open("a") as stderr:
            self.process, self._stdout = start(command, environ, stderr.fileno())
        self.stage = stage
        self.address = self.metrics = ""

    def wait_ready(self) -> None:
        line = self._stdout.readline()
        assert line.startswith("READY "), f"{self.stage} did not start:\n{self.log()}"
        facts = json.loads(line.removeprefix("READY "))
        assert facts["stage"] == self.stage
        assert facts["pid"] == self.process.pid
        self.address, self.metrics = facts["address"], facts["metrics"]

    def log(self) -> str:
        return self._log.read_text()

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://{self.metrics}{path}", timeout=LIMIT_S) as answer:
            return bytes(answer.read())

    def state(self) -> dict[str, Any]:
        return dict(json.loads(self.get("/debug/state")))

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


@dataclass
class Stages:
    """The three processes of one checkpoint."""

    checkpoint: Path
    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)
    processes: dict[str, StageProcess] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    """EPD_FAULTS of each stage."""

    def __enter__(self) -> Stages:
        self.make_whole()
        return self

    def make_whole(self) -> None:
        """Start what doesn't run: a test that failed may have left it so."""
        missing = [stage for stage in STAGES if not self._runs(stage)]
        for stage in missing:
            log = self.folder / f"{stage}.log"
            faults = self.faults.get(stage, "")
            made = StageProcess(stage, self.checkpoint, log, faults, **self.settings)
            self.processes[stage] = made
        for stage in missing:
            self.processes[stage].wait_ready()

    def _runs(self, stage: str) -> bool:
        return stage in self.processes and self.processes[stage].process.poll() is None

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.process.send_signal(signal.SIGTERM)
        codes = {stage: process.stop() for stage, process in self.processes.items()}
        logs = [p.log()[-3000:] for p in self.processes.values() if codes[p.stage]]
        assert not any(codes.values()), (codes, *logs)

    def idle(self, within_s: float = LIMIT_S, ignore: Sequence[str] = ()) -> dict[str, Any]:
        """Wait until nothing is held anywhere; what is left if something stays."""
        end = time.monotonic() + within_s
        while left := self._left(ignore):
            if time.monotonic() > end:
                return left
            time.sleep(0.05)
        return {}

    def _left(self, ignore: Sequence[str]) -> dict[str, Any]:
        names = {
            "streams", "waiting", "running", "tickets", "arena_bytes_used", "kv_blocks_used",
            "leases_open", "leased_bytes", "quarantined_bytes", "reads_parked",
            "reads_outstanding", "background",
        } - set(ignore)  # fmt: skip
        return {
            f"{stage}.{name}": value
            for stage, process in self.processes.items()
            for name, value in process.state().items()
            if (name in names and value) or (name == "integrity" and value != "ok")
        }
