"""Servers that are started together: some don't start, some are not waited for."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from bench.contenders import all_running, rival
from bench.peers.servers import Rival, free_port
from bench.service import still_runs
from tests.waiting import LIMIT_S, until

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "demo" / "checkpoint"
HEALTHY = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""
NEVER_UP = "import time; print('begun', flush=True); time.sleep(3600)"
SCRIPT = f"""
import sys
from pathlib import Path
from bench.contenders import all_running, epd_with, rival
from bench.peers.servers import Rival
from bench.service import end_on_sigterm
out = Path(sys.argv[1])
slow = Rival("slow", (sys.executable, "-c", {NEVER_UP!r}), 9, start_limit_s=3600.0)
end_on_sigterm()
with all_running([rival(slow, out / "slow.log", 1), epd_with(Path(sys.argv[2]), 1, out, ())]):
    print("all are up")
"""


def _hears_ctrl_c() -> None:
    """What a shell starts in the background ignores it, and so does all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_script_that_is_ended_waits_for_no_start(
    tmp_path: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(CHECKPOINT)]
    logs = tmp_path / "slow.log", tmp_path / "epd colocated.log"
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_hears_ctrl_c,
    ) as script:
        try:
            family = psutil.Process(script.pid)
            await until(lambda: all(log.exists() for log in logs) and logs[0].read_text())
            begun = family.children()
            assert len(begun) == 2
            script.send_signal(number)
            said, _ = script.communicate(timeout=LIMIT_S)
        except BaseException:  # or leaving the block waits for it
            for process in (*family.children(recursive=True), family):
                process.kill()
            raise
    assert (said, script.returncode == 0) == ("", False)
    assert not [process for process in begun if still_runs(process)]


def test_one_that_does_not_start_is_said_and_the_others_go_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    port, others = free_port(), psutil.Process().children()
    rivals = [
        Rival("missing", (str(tmp_path / "no such program"),), 9),
        Rival("ends", (sys.executable, "-c", ""), 9),
        Rival("late", (sys.executable, "-c", NEVER_UP), 9, start_limit_s=0.0),
        Rival("good", (sys.executable, "-c", HEALTHY, str(port)), port),
    ]
    with all_running([rival(one, tmp_path / f"{one.name}.log", 1) for one in rivals]) as found:
        (good,) = found
        assert (good.name, good.how) == ("good", "1 threads")
        begun = set(psutil.Process().children()) - set(others)
        assert [child.pid for child in begun] == [good.pid]
    assert not psutil.pid_exists(good.pid)
    said = capfd.readouterr().err
    assert said.count("left out: ") == 3
    assert "no such program" in said
    assert "ends did not start" in said


def test_where_none_starts_there_is_nothing_to_measure(tmp_path: Path) -> None:
    ends = Rival("ends", (sys.executable, "-c", ""), 9)
    with (
        pytest.raises(RuntimeError, match="no server"),
        all_running([rival(ends, tmp_path / "log", 1)]),
    ):
        pass
