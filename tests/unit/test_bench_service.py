"""Scripts that start services."""

from __future__ import annotations

import signal
import subprocess
import sys

_SCRIPT = """
import time
from bench.service import end_on_sigterm
end_on_sigterm()
try:
    print("up", flush=True)
    time.sleep(60)
finally:
    print("stopped what it started", flush=True)
"""


def test_sigterm_lets_a_script_stop_what_it_started() -> None:
    command = [sys.executable, "-c", _SCRIPT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as script:
        assert script.stdout is not None
        assert script.stdout.readline() == b"up\n"
        script.send_signal(signal.SIGTERM)
        said, _ = script.communicate(timeout=30)
    assert said == b"stopped what it started\n"
    assert script.returncode != 0
