"""`epd serve` as a person uses it: it starts all, stops all, says why it can't, and says
nothing else."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.service import still_runs
from tests.e2e.cluster import DEMO_CHECKPOINT, ROOT
from tests.e2e.conftest import COLOUR, picture, user
from tests.e2e.member import request
from tests.waiting import LIMIT_S

SHARED = Path("/dev/shm")
OURS = re.compile(
    r"(epd serve:|\[(gateway|encode|prefill|decode)(-\d+)?\]) \d\d:\d\d:\d\d\.\d{3} (?(2)[DI] \2 )"
)
"""What may stand on the console while all is well: of a stage's log no warning, no error."""


@dataclass
class Serving:
    """`epd serve` that serves."""

    process: subprocess.Popen[str]
    url: str = ""
    out: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    family: list[psutil.Process] = field(default_factory=list)

    def ask(self) -> None:
        """One picture, one question, the right answer."""
        body = {"model": "checkpoint", "messages": [user(picture("red_circle.png"), COLOUR)]}
        address = self.url.removeprefix("http://").removesuffix("/v1")
        reply = request(address, "/v1/chat/completions", {**body, "temperature": 0})
        assert reply.status == 200, reply
        assert reply.text == "The circle is red."


def _launch(*arguments: str) -> subprocess.Popen[str]:
    ports = ("http_port", "grpc_port", "membership_port")
    settings = [part for port in ports for part in ("--set", f"gateway.{port}=0")]
    command = [sys.executable, "-m", "epd.cli", "serve", *arguments, *settings]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _serve() -> Serving:
    serving = Serving(_launch(str(DEMO_CHECKPOINT)))
    process = serving.process
    assert process.stdout is not None
    assert process.stderr is not None
    threading.Thread(target=serving.errors.extend, args=(process.stderr,), daemon=True).start()
    for line in process.stdout:
        serving.out.append(line)
        if found := re.match(r"epd serve: \S+ serving \S+ at (\S+) ", line):
            serving.url = found[1]
            serving.family = psutil.Process(process.pid).children(recursive=True)
            threading.Thread(target=serving.out.extend, args=(process.stdout,), daemon=True).start()
            return serving
    raise AssertionError("".join(serving.errors))


def _kill(serving: Serving) -> None:
    """Everything, as a machine that is out of memory might."""
    everyone = [serving.process.pid, *(member.pid for member in serving.family)]
    for pid in everyone:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)
    serving.process.wait(LIMIT_S)
    psutil.wait_procs(serving.family, timeout=LIMIT_S)


def test_it_serves_and_ctrl_c_stops_all_processes() -> None:
    serving = _serve()
    try:
        named = [member.cmdline() for member in psutil.Process(serving.process.pid).children()]
        roles = {line[3] for line in named if line[1:3] == ["-m", "epd.cli"]}
        assert roles == {"gateway", "encode", "prefill", "decode"}
        serving.ask()
        serving.process.send_signal(signal.SIGINT)
        assert serving.process.wait(LIMIT_S) == 0, "".join(serving.errors)
    finally:
        _kill(serving)
    assert not [member for member in serving.family if still_runs(member)]
    said = [*serving.out, *serving.errors]
    assert any("answer ended" in line for line in said)
    assert not [line for line in said if not OURS.match(line)]


def test_killing_everything_leaves_nothing_in_shared_memory() -> None:
    """No semaphore, no segment: nothing that has a name outlives its processes, since
    nothing has one."""
    before = set(os.listdir(SHARED))
    serving = _serve()
    try:
        serving.ask()
        named = {name for member in serving.family for name in _held(member.pid)}
        assert not named
    finally:
        _kill(serving)
    assert not [member for member in serving.family if still_runs(member)]
    others = {name for pid in psutil.pids() for name in _held(pid)}
    assert not set(os.listdir(SHARED)) - before - others


def _held(pid: int) -> set[str]:
    """Names in /dev/shm that a process has mapped or open."""
    process = Path(f"/proc/{pid}")
    paths: list[str] = []
    try:
        paths += re.findall(rf"{SHARED}/\S+", (process / "maps").read_text())
        paths += [os.readlink(link) for link in (process / "fd").iterdir()]
    except OSError:  # it has ended, or isn't ours
        return set()
    return {Path(path).name for path in paths if path.startswith(f"{SHARED}/")}


def test_a_missing_checkpoint_is_a_reason(tmp_path: Path) -> None:
    process = _launch(str(tmp_path / "nothing"))
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "not a checkpoint" in errors
    assert "Traceback" not in errors


def test_a_broken_checkpoint_is_a_reason(tmp_path: Path) -> None:
    """Its weights are whole, so only the processes find out."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").symlink_to(DEMO_CHECKPOINT / "model.safetensors")
    process = _launch(str(tmp_path))
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    (reason,) = [line for line in errors.splitlines() if line.startswith("epd serve: can't start")]
    assert str(tmp_path) in reason
    assert "Traceback" not in errors
