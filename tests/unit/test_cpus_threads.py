"""OpenMP's threads of a thread that only loaded the model don't outlive the loading."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import os, threading
from epd.cpus import prepare_threads, release_threads
release_threads()  # before there is any OpenMP
prepare_threads(2)
import torch
torch.set_num_threads(2)
numbers = []
def compute():
    torch.randn(2000, 2000).exp_()
    numbers.append(len(os.listdir("/proc/self/task")))
compute()
release_threads()
numbers.append(len(os.listdir("/proc/self/task")))
engine = threading.Thread(target=compute)
engine.start()
engine.join()
compute()
print(*numbers)
"""


def test_helpers_of_the_loading_thread_end_and_come_again_if_it_computes() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    loading, released, engine, again = map(int, ran.stdout.split())
    assert loading > released, "its helper ended"
    assert engine == released + 2, "the engine thread, and its helper"
    assert again >= loading
