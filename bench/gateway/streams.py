"""How much a streamed token costs the gateway, and how many streams it bears.

    python -m bench.gateway.streams --clients 1000 --tokens 64 --rate 4
    python -m bench.gateway.streams --clients 64 --tokens 200 --rate 20 --rounds 3

A real gateway process over a scripted engine (no model), real sockets on loopback; then,
interleaved, the same uvicorn sending ready-made events at the same pace. CPU time is that of
the serving process, with its children. Exit code 1 if any stream was not whole.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.gateway.clients import Outcome, request, run
from bench.gateway.processes import CHECKPOINT, child, cpu_s, engine, gateway, served


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


def measure(server: psutil.Process, address: str, raw: bytes, clients: int, ramp_s: float) -> Round:
    before, peak, over = cpu_s(server), [server.memory_info().rss], threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            peak[0] = max(peak[0], server.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    outcomes = asyncio.run(run(address, raw, clients, ramp_s))
    over.set()
    thread.join()
    used = cpu_s(server) - before
    ended = max(outcome.ended for outcome in outcomes)
    return Round(outcomes, used, ended - min(o.sent for o in outcomes), peak[0])


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
    about = __doc__.partition("\n")[0]
    parser = argparse.ArgumentParser(prog="bench.gateway.streams", description=about)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rate", type=float, default=4.0, help="tokens a second of one stream")
    parser.add_argument("--ramp", type=float, default=2.0, help="seconds until all have begun")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    options = parser.parse_args()
    tokens, rate = str(options.tokens), str(options.rate)
    with (
        gateway(options.checkpoint) as (server, addresses),
        child("-m", "bench.gateway.ceiling", tokens, rate) as (ceiling, web),
        engine(addresses, options.tokens, options.rate),
    ):
        model, _ = served(addresses["http"])
        return compare(options, (server, addresses["http"]), (ceiling, web["http"]), model)


def compare(
    options: argparse.Namespace,
    server: tuple[psutil.Process, str],
    ceiling: tuple[psutil.Process, str],
    model: str,
) -> int:
    raw = request(server[1], model, options.tokens)
    measure(*server, raw, min(options.clients, 100), options.ramp)  # warm
    rss = server[0].memory_info().rss
    rounds: list[Round] = []
    floor: list[Round] = []
    for _ in range(options.rounds):
        floor.append(measure(*ceiling, raw, options.clients, options.ramp))
        rounds.append(measure(*server, raw, options.clients, options.ramp))
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


if __name__ == "__main__":
    sys.exit(main())
