"""What the gateway adds: a real gateway process before an engine that costs nothing.

    python -m bench.gateway_overhead [CHECKPOINT] [--requests 40] [--json FILE]

- TTFT of a text, of a picture in a size seen before, of one in a new size: all of it is the
  gateway's, the three scripted stages' (`bench.scripted_stages`; Python, one process) and
  loopback's.
- CPU of the gateway's processes for each streamed token, at 1 and at 64 streams whose tokens
  come every 30 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.service import ROOT
from epd.bench.campaign import connect
from epd.bench.client import open_session
from epd.bench.load import Limits, Round, Workload, run_round
from epd.bench.record import Record
from epd.bench.report import markdown
from epd.bench.workload import UNLOADED, Load, Picture, Shape

PICTURE = (640, 480)
TOKENS = 64
GAP_S = 0.03
STREAMS = (1, 64)
_READY_LIMIT_S = 60.0


@contextmanager
def gateway(checkpoint: Path) -> Iterator[tuple[dict[str, str], int]]:
    """(its addresses, its pid)."""
    settings = [f"model.path={checkpoint}"]
    settings += [f"gateway.{port}_port=0" for port in ("http", "grpc", "membership")]
    settings += ["log.level=warning"]
    command = [sys.executable, "-m", "epd.cli", "gateway"]
    for setting in settings:
        command += ["--set", setting]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = next(line for line in process.stdout if line.startswith("READY "))
            yield json.loads(line.removeprefix("READY ")), process.pid
        finally:
            process.terminate()
            process.wait(60)


@contextmanager
def engine(
    checkpoint: Path, addresses: dict[str, str], tokens: int, gap_s: float
) -> Iterator[None]:
    """Scripted stages that the gateway knows."""
    command = [sys.executable, "-m", "bench.scripted_stages"]
    command += [str(checkpoint), addresses["membership"]]
    command += ["--tokens", str(tokens), "--gap-s", str(gap_s)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline().strip() == "joined", "the engine did not join"
            _until_ready(addresses["metrics"])
            yield
        finally:
            process.stdin.close()
            process.wait(60)


def _until_ready(metrics: str) -> None:
    """Wait until the gateway has a worker of each stage."""
    end = time.monotonic() + _READY_LIMIT_S
    while True:
        try:
            with urllib.request.urlopen(f"http://{metrics}/ready", timeout=2):
                return
        except OSError:  # not ready yet (503), or too busy to answer in time
            assert time.monotonic() < end, "the gateway is not ready"
            time.sleep(0.05)


def first_tokens(requests: int) -> dict[str, list[Shape]]:
    """Requests of each kind; the texts are short, so that tokenizing is not the subject."""
    rng = random.Random(0)
    seen = [Picture(*PICTURE, rng.getrandbits(62)) for _ in range(requests)]
    new = [Picture(320 + 28 * (n % 20), 300 + n, n) for n in range(requests)]
    return {
        "text": [Shape(30, 1)] * requests,
        f"picture of {PICTURE[0]} x {PICTURE[1]}, size seen before": [
            Shape(30, 1, (picture,)) for picture in seen
        ],
        "picture of a new size": [Shape(30, 1, (picture,)) for picture in new],
    }


async def measure_ttft(url: str, pid: int, requests: int) -> dict[str, list[float]]:
    """Seconds, one request at a time, kinds in turn; the first of each kind is dropped."""
    found: dict[str, list[float]] = {}
    async with open_session(60.0) as http:
        target = await connect("gateway", url, http, pids=(pid,))
        kinds = first_tokens(requests)
        for number in range(requests):
            for kind, shapes in kinds.items():
                workload = Workload([shapes[number]], seed=number)
                done = await run_round(target, UNLOADED, 1, workload, Limits(60.0))
                found.setdefault(kind, []).append(_good(done)[0].ttft)
    return {kind: values[1:] for kind, values in found.items()}


async def measure_streams(url: str, pid: int) -> dict[int, float]:
    """Streams -> CPU seconds of the gateway a token."""
    found = {}
    async with open_session(60.0) as http:
        target = await connect("gateway", url, http, pids=(pid,))
        for streams in STREAMS:
            workload = Workload([Shape(30, TOKENS)] * max(8, streams))
            for number in range(2):  # the first one warms up
                load = Load("concurrency", streams)
                done = await run_round(target, load, number, workload, Limits(60.0))
            tokens = sum(record.output_tokens for record in _good(done))
            assert done.usage.server is not None
            found[streams] = done.usage.server * done.wall_s / tokens
    return found


def _good(done: Round) -> list[Record]:
    failed = [f"{r.error}: {r.detail}" for r in done.records if not r.ok]
    if failed:
        raise SystemExit(f"a request failed: {failed[0]}")
    return done.records


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, nargs="?", default=ROOT / "demo" / "checkpoint")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with gateway(given.checkpoint) as (addresses, pid):
        url = f"http://{addresses['http']}/v1"
        with engine(given.checkpoint, addresses, 1, 0.0):
            ttft = asyncio.run(measure_ttft(url, pid, given.requests))
        with engine(given.checkpoint, addresses, TOKENS, GAP_S):
            cpu = asyncio.run(measure_streams(url, pid))
    rows = [
        [f"TTFT, {kind}", *(f"{value * 1e3:.2f} ms" for value in (statistics.median(v), min(v)))]
        for kind, v in ttft.items()
    ]
    rows += [[f"CPU a token, {n} streams", f"{s * 1e3:.3f} ms", ""] for n, s in cpu.items()]
    print(markdown(["", "median", "least"], rows))
    if given.json:
        given.json.write_text(json.dumps({"ttft_s": ttft, "cpu_s_per_token": cpu}, indent=1))


if __name__ == "__main__":
    main()
