"""How much a streamed token costs the gateway, and how many streams it bears.

    python -m bench.gateway --clients 1000 --tokens 64 --rate 4
    python -m bench.gateway --clients 64 --tokens 200 --rate 20 --rounds 3

A real gateway process over a scripted engine (no model), real sockets on loopback; then,
interleaved, the same uvicorn sending ready-made events at the same pace. CPU time is that of
the serving process alone. Exit code 1 if any stream was not whole.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.gateway.clients import Outcome, request, run
from bench.gateway.engine import DTYPE
from epd.lifetime import expect_parent

CHECKPOINT = Path(__file__).resolve().parents[2] / "demo" / "checkpoint"
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


SETTINGS = [part for key, value in _SET.items() for part in ("--set", f"{key}={value}")]
"""Of the gateway: any free ports, and room for all streams."""


@dataclass
class Round:
    """What one round of clients saw, and what it cost the server."""

    outcomes: list[Outcome]
    cpu_s: float
    wall_s: float
    peak_rss: int

    @property
    def events(self) -> int:
        return sum(outcome.events for outcome in self.outcomes)

    @property
    def broken(self) -> list[Outcome]:
        return [one for one in self.outcomes if one.status != 200 or not one.done or one.error]


@contextmanager
def child(*arguments: str) -> Iterator[tuple[psutil.Process, dict[str, Any]]]:
    """A process of this interpreter that prints READY, with what it says there."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
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


def measure(server: psutil.Process, address: str, raw: bytes, clients: int, ramp_s: float) -> Round:
    before, peak, over = server.cpu_times(), [server.memory_info().rss], threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            peak[0] = max(peak[0], server.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    outcomes = asyncio.run(run(address, raw, clients, ramp_s))
    over.set()
    thread.join()
    after = server.cpu_times()
    cpu_s = after.user + after.system - before.user - before.system
    ended = max(outcome.ended for outcome in outcomes)
    return Round(outcomes, cpu_s, ended - min(o.sent for o in outcomes), peak[0])


def served(address: str) -> tuple[str, str]:
    """Id and fingerprint of the model."""
    with urllib.request.urlopen(f"http://{address}/v1/models", timeout=10) as reply:
        model = json.load(reply)["data"][0]
    return model["id"], model["fingerprint"]


def show(name: str, rounds: list[Round], tokens: int) -> float:
    """Prints a row; returns the CPU time of a token in ms."""
    last = rounds[-1]
    wanted = len(last.outcomes) * tokens
    per_token = statistics.median(one.cpu_s / wanted * 1e3 for one in rounds)
    firsts = sorted(one.first - one.sent for round in rounds for one in round.outcomes if one.first)
    busy = statistics.median(one.events / one.cpu_s for one in rounds)
    print(
        f"| {name} | {len(last.outcomes)} | {sum(len(one.broken) for one in rounds)} "
        f"| {statistics.median(one.events for one in rounds):.0f} | {per_token:.4f} "
        f"| {busy:.0f} | {statistics.median(one.wall_s for one in rounds):.1f} "
        f"| {firsts[len(firsts) // 2] * 1e3:.0f} / {firsts[int(len(firsts) * 0.99)] * 1e3:.0f} "
        f"| {max(one.peak_rss for one in rounds) >> 20} |"
    )
    return per_token


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.gateway", description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rate", type=float, default=4.0, help="tokens a second of one stream")
    parser.add_argument("--ramp", type=float, default=2.0, help="seconds until all have begun")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--checkpoint", default=str(CHECKPOINT))
    options = parser.parse_args()
    tokens, rate = str(options.tokens), str(options.rate)
    gateway_command = ("-m", "epd.cli", "gateway", options.checkpoint, *SETTINGS)
    with (
        child(*gateway_command) as (gateway, report),
        child("-m", "bench.gateway.ceiling", tokens, rate) as (ceiling, web),
    ):
        model, fingerprint = served(report["http"])
        engine = ("-m", "bench.gateway.engine", report["membership"], fingerprint, tokens, rate)
        with child(*engine):
            return compare(options, (gateway, report["http"]), (ceiling, web["http"]), model)


def compare(
    options: argparse.Namespace,
    gateway: tuple[psutil.Process, str],
    ceiling: tuple[psutil.Process, str],
    model: str,
) -> int:
    raw = request(gateway[1], model, options.tokens)
    until_ready(gateway[1])
    measure(*gateway, raw, min(options.clients, 100), options.ramp)  # warm
    rss = gateway[0].memory_info().rss
    rounds: list[Round] = []
    floor: list[Round] = []
    for _ in range(options.rounds):
        floor.append(measure(*ceiling, raw, options.clients, options.ramp))
        rounds.append(measure(*gateway, raw, options.clients, options.ramp))
    print("| server | streams | broken | events | CPU ms a token | events a CPU-second | wall s "
          "| first event p50 / p99 ms | peak RSS MiB |\n|" + "---|" * 9)  # fmt: skip
    own = show("gateway", rounds, options.tokens)
    web = show("uvicorn alone", floor, options.tokens)
    grown = max(one.peak_rss for one in rounds) - rss
    print(f"\ngateway / uvicorn alone: {own / web:.1f}; a stream takes "
          f"{grown / options.clients / 1024:.0f} KiB of the gateway")  # fmt: skip
    broken = [one for round in (*rounds, *floor) for one in round.broken]
    for one in broken[:5]:
        print(f"broken: {one}", file=sys.stderr)
    return 1 if broken else 0


def until_ready(address: str) -> None:
    """Until the engine has joined."""
    until = time.monotonic() + _READY_S
    while time.monotonic() < until:
        with urllib.request.urlopen(f"http://{address}/debug/state", timeout=10) as reply:
            if json.load(reply)["workers"]:
                return
        time.sleep(0.2)
    raise SystemExit("the engine did not join")


if __name__ == "__main__":
    sys.exit(main())
