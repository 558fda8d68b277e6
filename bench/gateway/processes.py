"""A real gateway process, a scripted engine that it knows, and what they cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from bench.gateway.engine import DTYPE
from bench.loopback import get
from epd.lifetime import expect_parent

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "demo" / "checkpoint"
_READY_S = 120
_SET = {
    "gateway.http_port": 0,
    "gateway.grpc_port": 0,
    "gateway.membership_port": 0,
    "gateway.max_connections": 10_000,
    "gateway.dead_s": 60,  # on a full machine the engine's own loop may lag
    "limits.max_inflight": 10_000,
    "limits.max_context": 4096,
    "model.dtype": DTYPE,
    "log.level": "error",
}
_SETTINGS = [part for key, value in _SET.items() for part in ("--set", f"{key}={value}")]


@contextmanager
def child(*arguments: str) -> Iterator[tuple[psutil.Process, dict[str, Any]]]:
    """A process of this interpreter that prints READY, with what it says there."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env=expect_parent(dict(os.environ)),
    )
    assert process.stdout is not None
    timer = threading.Timer(_READY_S, process.kill)
    timer.start()
    try:
        line = ""
        while not line.startswith("READY"):
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"{arguments[1]} did not start")
        timer.cancel()
        report = line.removeprefix("READY").strip()
        yield psutil.Process(process.pid), json.loads(report) if report else {}
    finally:
        timer.cancel()
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def gateway(
    checkpoint: Path = CHECKPOINT, cpus: str = ""
) -> Iterator[tuple[psutil.Process, dict[str, Any]]]:
    """The process and its addresses: any free ports, and room for all streams. It and its
    helpers run on `cpus`, if any are named."""
    pinned = ("--set", f"gateway.cpus={cpus}") if cpus else ()
    with child("-m", "epd.cli", "gateway", str(checkpoint), *_SETTINGS, *pinned) as found:
        yield found


@contextmanager
def engine(addresses: dict[str, Any], tokens: int, rate: float) -> Iterator[str]:
    """A scripted engine that this gateway knows (`bench.gateway.engine`); its address."""
    _, fingerprint = served(addresses["http"])
    told = (addresses["membership"], fingerprint, str(tokens), str(rate))
    with child("-m", "bench.gateway.engine", *told) as (_, report):
        _until_ready(addresses["http"])
        yield report["grpc"]


def served(address: str) -> tuple[str, str]:
    """Id and fingerprint of the model."""
    with get(f"http://{address}/v1/models", 10) as reply:
        model = json.load(reply)["data"][0]
    return model["id"], model["fingerprint"]


def cpu_s(process: psutil.Process) -> float:
    """CPU time of a process, all its threads and its children's."""
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(time.user + time.system for time in times)


def _until_ready(address: str) -> None:
    """Until the gateway has a worker of each stage."""
    until = time.monotonic() + _READY_S
    while time.monotonic() < until:
        try:
            with get(f"http://{address}/ready", 2):
                return
        except OSError:  # not ready yet (503), or too busy to answer in time
            time.sleep(0.05)
    raise SystemExit("the engine did not join")
