"""The supervisor with stand-in stages: starting, failing, restarting, stopping."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from epd import child as child_module
from epd.child import Child
from epd.config import ServeConfig
from epd.config_sources import load_config
from epd.errors import EpdError
from epd.obs.http import ObservationServer
from epd.supervisor import Supervisor, _why_not_ready, planned
from tests.waiting import block_until, until

STAND_IN = """
import http.server, json, os, signal, sys, time

role = sys.argv[1]
mode = os.environ.get("MODE_" + role.upper(), "")
settings = dict(setting.split("=", 1) for setting in sys.argv[2:])

def ready(**addresses):
    report = {"stage": role, "pid": os.getpid()} | addresses
    print("READY " + json.dumps(report), flush=True)

class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments):
        pass

if mode == "fail":
    print("Traceback: long story", file=sys.stderr)
    sys.exit(f"epd {role}: the weights are missing")
if mode == "silent":
    time.sleep(60)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if role == "gateway":
    port = int(settings.get("gateway.http_port", 0))
    server = http.server.HTTPServer(("127.0.0.1", port), Ready)
    at = f"127.0.0.1:{server.server_port}"
    ready(http=at, grpc=at, membership=at, metrics=at)
    server.serve_forever()
assert settings["worker.gateways"]
port = int(settings.get("worker.metrics_port", 0)) or os.getpid()
ready(address="a:1", metrics=f"a:{port}")
print("working", flush=True)
while True:
    time.sleep(60)
"""

Make = Callable[..., Supervisor]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """``make(**{"serve.encode": 2})``: a supervisor of stand-ins."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")

    def command_line(role: str, settings: Mapping[str, str]) -> list[str]:
        command = [sys.executable, "-m", "stand_in", role]
        return [*command, *(f"{k}={v}" for k, v in settings.items())]

    monkeypatch.setattr(child_module, "command_line", command_line)

    def supervisor(**flags: object) -> Supervisor:
        defaults = {"worker.grace_s": 0.0, "serve.backoff_s": 0.05, "model.path": "/m"}
        defaults["serve.preload"] = False
        return Supervisor(load_config(None, defaults | flags, {}))

    return supervisor


async def shown_until_serving(capsys: pytest.CaptureFixture[str]) -> str:
    """What a supervisor prints until it says that it serves."""
    shown = ""

    def says_serving() -> bool:
        nonlocal shown
        shown += capsys.readouterr().out
        return "Ctrl-C stops" in shown

    await until(says_serving)
    return shown


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_stages_that_take_turns_are_told_one_file_of_the_supervisors(make: Make) -> None:
    supervisor = make(**{"serve.turns": True})
    (file,) = {worker.settings["worker.turns_file"] for worker in supervisor.workers}
    os.close(os.open(file, os.O_RDWR))
    assert "worker.turns_file" not in supervisor.gateway.settings
    supervisor.stop()
    await supervisor.serve()
    assert not os.path.exists(file)


async def test_a_named_file_for_turns_is_not_replaced(make: Make) -> None:
    named = make(**{"serve.turns": True, "worker.turns_file": "/run/turns"})
    assert all("worker.turns_file" not in worker.settings for worker in named.workers)
    named.stop()
    await named.serve()


async def test_starts_all_shows_them_and_stops_all(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    supervisor = make(**{"serve.encode": 2, "serve.decode": 3})
    serving = asyncio.create_task(supervisor.serve())
    shown = await shown_until_serving(capsys)
    pids = [child.report["pid"] for child in supervisor.children]
    assert len(set(pids)) == 7
    for name in ("gateway", "encode-1", "prefill-0", "decode-2"):
        assert name in shown
    own = [line for line in shown.splitlines() if line.startswith("epd serve: ")]
    timed = re.compile(r"epd serve: \d\d:\d\d:\d\d\.\d{3} (starting|\S+ ready after|serving) ")
    assert len(own) == 9
    assert all(map(timed.match, own)), "as the children's lines beside them"
    supervisor.stop()
    assert await serving == 0
    assert not any(map(alive, pids))


async def test_all_times_are_since_serve_began(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is imported before anything is forked is no child's own, and waited for, too."""
    supervisor = make()
    supervisor.started -= 1000  # as if that had taken so long
    serving = asyncio.create_task(supervisor.serve())
    shown = await shown_until_serving(capsys)
    supervisor.stop()
    assert await serving == 0
    told = [float(seconds) for seconds in re.findall(r" after (\S+) s[,;]", shown)]
    assert len(told) == 5, "four processes and the service"
    assert min(told) >= 1000


async def test_the_gateway_is_asked_past_the_proxy_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    server = ObservationServer("gateway", dict, lambda: "")
    address = await server.start("127.0.0.1", 0)
    try:
        assert await asyncio.to_thread(_why_not_ready, address) is None
    finally:
        await server.close()


@pytest.mark.parametrize("role", ["gateway", "decode"])
async def test_a_stage_that_cannot_start_ends_all_with_its_reason(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], role: str
) -> None:
    monkeypatch.setenv(f"MODE_{role.upper()}", "fail")
    supervisor = make()
    assert await supervisor.serve() == 1
    (reason,) = [line for line in capsys.readouterr().err.splitlines() if "can't start" in line]
    assert role in reason
    assert "exit code 1" in reason
    assert reason.endswith(": the weights are missing")
    assert not any(child.running for child in supervisor.children)


async def test_a_stage_that_never_gets_ready_has_failed(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MODE_PREFILL", "silent")
    # the others, an interpreter each, get ready long before that on a busy machine, too
    supervisor = make(**{"serve.start_timeout_s": 6.0})
    assert await supervisor.serve() == 1
    assert "prefill-0: not ready after 6 s" in capsys.readouterr().err
    assert not any(child.running for child in supervisor.children)


async def test_ctrl_c_while_starting_stops_what_was_started(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODE_PREFILL", "silent")
    supervisor = make()
    serving = asyncio.create_task(supervisor.serve())
    await until(lambda: supervisor.gateway.ready.is_set())
    supervisor.stop()
    assert await serving == 0
    assert not any(child.running for child in supervisor.children)


async def _until_another(child: Child, before: int) -> None:
    """Until this child is ready again, under another pid."""
    await until(lambda: child.ready.is_set() and child.report["pid"] != before)


async def test_a_dead_worker_and_a_dead_gateway_come_back(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    supervisor = make()
    serving = asyncio.create_task(supervisor.serve())
    await until(lambda: "Ctrl-C stops" in capsys.readouterr().out)
    where = [supervisor.gateway.report["http"], *metrics(supervisor)]
    for child in (supervisor.workers[0], supervisor.gateway):
        before = child.report["pid"]
        os.kill(before, signal.SIGKILL)
        await _until_another(child, before)
    assert [supervisor.gateway.report["http"], *metrics(supervisor)] == where
    supervisor.stop()
    assert await serving == 0


class Full(io.TextIOBase):
    """A console on a full disk, or a terminal that is gone."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


async def test_a_console_that_can_not_be_written_to_stops_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = make()
    monkeypatch.setattr(sys, "stdout", Full())
    monkeypatch.setattr(sys, "stderr", Full())
    serving = asyncio.create_task(supervisor.serve())
    await until(lambda: all(child.ready.is_set() for child in supervisor.children))
    child = supervisor.workers[0]
    await until(lambda: "working" in child.tail)  # its words are taken all the same
    before = child.report["pid"]
    os.kill(before, signal.SIGKILL)
    await until(lambda: child.ready.is_set() and child.report["pid"] != before)
    supervisor.stop()
    assert await serving == 0


async def test_a_fault_of_the_supervisor_does_not_leave_processes_alone(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own manager starts it again; one that nobody watches stays dead."""
    supervisor = make()
    serving = asyncio.create_task(supervisor.serve())
    await until(lambda: "Ctrl-C stops" in capsys.readouterr().out)
    monkeypatch.setattr(child_module.Child, "kill_group", lambda child: 1 / 0)
    os.kill(supervisor.gateway.report["pid"], signal.SIGKILL)
    with pytest.raises(ZeroDivisionError):
        await serving
    monkeypatch.undo()
    assert await supervisor._stop_all()


def metrics(supervisor: Supervisor) -> list[str]:
    return [child.report["metrics"] for child in supervisor.children]


@pytest.mark.parametrize(("encoders", "told"), [(0, "0"), (1, None)])
async def test_the_gateway_knows_that_no_encoder_will_come(
    make: Make, encoders: int, told: str | None
) -> None:
    supervisor = make(**{"serve.encode": encoders})
    serving = asyncio.create_task(supervisor.serve())
    await until(lambda: all(child.ready.is_set() for child in supervisor.children))
    supervisor.stop()
    assert await serving == 0
    assert supervisor.gateway.settings.get("serve.encode") == told


async def test_each_worker_has_ports_of_its_own(make: Make) -> None:
    flags = {"serve.decode": 2, "worker.port": 9200, "worker.metrics_port": 9100}
    settings = [child.settings for child in make(**flags).workers]
    assert [own["worker.port"] for own in settings] == ["9200", "9201", "9202", "9203"]
    assert [own["worker.metrics_port"] for own in settings] == ["9100", "9101", "9102", "9103"]
    assert not any(child.settings for child in make(**{"worker.metrics_port": -1}).workers)


async def test_without_restart_a_dead_worker_stays_dead(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    supervisor = make(**{"serve.restart": False})
    serving = asyncio.create_task(supervisor.serve())
    await until(lambda: "Ctrl-C stops" in capsys.readouterr().out)
    os.kill(supervisor.workers[0].report["pid"], signal.SIGKILL)
    await until(lambda: "ended: encode-0 (SIGKILL): killed from outside" in capsys.readouterr().err)
    assert not supervisor.workers[0].running
    supervisor.stop()
    assert await serving == 0


async def test_a_stubborn_process_is_killed_and_reported(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("epd.supervisor._KILL_MARGIN_S", 2)
    monkeypatch.setenv("MODE_DECODE", "stubborn")
    supervisor = make()
    serving = asyncio.create_task(supervisor.serve())
    await until(lambda: "Ctrl-C stops" in capsys.readouterr().out)
    supervisor.stop()
    assert await serving == 1
    captured = capsys.readouterr()
    assert "decode-0 did not stop in time: killed" in captured.err
    assert "1 by force" in captured.out
    assert not any(child.running for child in supervisor.children)


CHILD = """
import time
from epd.lifetime import die_with_expected_parent
die_with_expected_parent()
print("up", flush=True)
time.sleep(60)
"""

PARENT = """
import os, subprocess, sys, time
from epd.lifetime import expect_parent
child = subprocess.Popen(
    [sys.executable, "-c", sys.argv[1]],
    env=expect_parent(dict(os.environ)),
    stdout=subprocess.PIPE,
)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


def test_children_do_not_outlive_a_killed_parent() -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", PARENT, CHILD]
    parent = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    block_until(lambda: not _runs(child))


def _runs(pid: int) -> bool:
    """True unless gone, or dead and merely not yet collected by init."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"decode": 2}, [("encode", 0), ("prefill", 0), ("decode", 0), ("decode", 1)]),
        ({"stages": ["encode+prefill+decode"]}, [("encode+prefill+decode", 0)]),
        (
            {"stages": ["encode", "decode + prefill", "decode", "prefill+decode"]},
            [("encode", 0), ("prefill+decode", 0), ("decode", 0), ("prefill+decode", 1)],
        ),
    ],
    ids=["counts", "monolithic", "mixed"],
)
def test_the_processes_of_a_service(
    settings: dict[str, object], expected: list[tuple[str, int]]
) -> None:
    assert planned(ServeConfig.model_validate(settings)) == expected


@pytest.mark.parametrize(
    ("stages", "reason"),
    [
        (["encode+decode"], "no process hosts prefill"),
        (["prefill+prefill", "decode"], "twice"),
        (["prefill+gateway", "decode"], "the stages are"),
        (["prefill+", "decode"], "the stages are"),
    ],
)
def test_a_service_that_can_not_work_is_refused(stages: list[str], reason: str) -> None:
    with pytest.raises(EpdError, match=reason):
        planned(ServeConfig.model_validate({"stages": stages}))


def test_several_stages_are_one_command() -> None:
    line = child_module.command_line("prefill+decode", {"a.b": "1"})
    assert line[-5:] == ["worker", "--stages", "prefill+decode", "--set", "a.b=1"]
