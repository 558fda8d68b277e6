"""`epd serve` as a person uses it: it starts all, stops all, and says why it can't."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil

from tests.e2e.cluster import DEMO_CHECKPOINT, ROOT, still_runs


def _serve(*arguments: str) -> subprocess.Popen[str]:
    ports = ("http_port", "grpc_port", "membership_port")
    settings = [part for port in ports for part in ("--set", f"gateway.{port}=0")]
    command = [sys.executable, "-m", "epd.cli", "serve", *arguments, *settings]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_ctrl_c_stops_all_processes() -> None:
    process = _serve(str(DEMO_CHECKPOINT))
    assert process.stdout is not None
    assert process.stderr is not None
    errors: list[str] = []
    threading.Thread(target=errors.extend, args=(process.stderr,), daemon=True).start()
    try:
        line = next((line for line in process.stdout if "serving" in line), None)
        assert line is not None, "".join(errors)
        family = psutil.Process(process.pid).children(recursive=True)
        named = [member.cmdline() for member in psutil.Process(process.pid).children()]
        roles = {line[3] for line in named if line[1:3] == ["-m", "epd.cli"]}
        assert roles == {"gateway", "encode", "prefill", "decode"}
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0, "".join(errors)
    finally:
        process.kill()
    psutil.wait_procs(family, timeout=5)
    assert not [member for member in family if still_runs(member)]


def test_a_missing_checkpoint_is_a_reason(tmp_path: Path) -> None:
    process = _serve(str(tmp_path / "nothing"))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "not a checkpoint" in errors
    assert "Traceback" not in errors


def test_a_broken_checkpoint_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    process = _serve(str(tmp_path))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    (reason,) = [line for line in errors.splitlines() if line.startswith("epd serve: can't start")]
    assert str(tmp_path) in reason
    assert "Traceback" not in errors
