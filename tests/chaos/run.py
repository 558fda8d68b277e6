"""An hour (or two minutes) of checked traffic over a service that is hurt all the time.

    python -m tests.chaos.run --minutes 60 [--seed 1] [--clients 4] [--workers 2]
        [--set model.dtype=bfloat16]

Ctrl-C or SIGTERM ends it early, with the report of what was until then. Prints a table; ends
with 1 if anything happened that may never happen: a wrong answer, a request that hangs or ends
without a typed error, something that is left over.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.injuries import Injury, Tormentor
from tests.chaos.outcomes import NEVER, Outcome, Outcomes
from tests.chaos.questions import questions
from tests.chaos.service import Service
from tests.chaos.traffic import Traffic

WIRED = ("prefill-1", "decode-1")
SHOWN = 10
"""Faults that the report tells in full."""


@dataclass(slots=True)
class Report:
    """What a run showed."""

    minutes: float
    outcomes: Outcomes
    injuries: list[Injury]
    afterwards: list[Outcome]
    leaks: list[str]
    skipped: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not (self.outcomes.faults or self.afterwards or self.leaks)

    def text(self) -> str:
        counts = self.outcomes.counts
        typed = {kind: n for kind, n in counts.items() if kind not in _UNTYPED}
        times = [self.outcomes.recovery_s(injury.started) for injury in self.injuries]
        longest = max((time_s for time_s in times if time_s is not None), default=0.0)
        rows = [
            ("minutes", f"{self.minutes:.1f}"),
            ("injuries", _counted(Counter(injury.what for injury in self.injuries))),
            ("requests sent", str(len(self.outcomes.all))),
            ("right", str(counts["right"])),
            ("left by their client", str(counts["aborted"])),
            ("gateway itself was hurt", str(counts["gateway lost"])),
            ("typed errors", _counted(typed)),
            *((kind, str(counts[kind])) for kind in NEVER),
            ("not right when all was whole again", str(len(self.afterwards))),
            ("left over", str(len(self.leaks))),
            ("longest recovery", f"{longest:.1f} s"),
            ("longest time without a right answer", f"{self.outcomes.longest_silence_s:.1f} s"),
            ("skipped on this machine", "; ".join(self.skipped) or "nothing"),
        ]
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {value}" for name, value in rows]
        for outcome in (*self.outcomes.faults, *self.afterwards)[:SHOWN]:
            lines.append(f"! {outcome.kind}: {outcome.question}, {outcome.how}: {outcome.detail}")
        return "\n".join([*lines, *(f"! left over: {line}" for line in self.leaks[:SHOWN])])


_UNTYPED = {"right", "aborted", "gateway lost", *NEVER}


def _counted(counts: Counter[str] | dict[str, int]) -> str:
    total = sum(counts.values())
    parts = ", ".join(f"{n} {what}" for what, n in sorted(counts.items()))
    return f"{total} ({parts})" if parts else "0"


async def hurt(
    folder: Path,
    minutes: float,
    seed: int,
    clients: int,
    workers: int,
    settings: Mapping[str, str] | None = None,
    told: asyncio.Event | None = None,
) -> Report:
    """One run; the service is started and stopped in it. `told` ends it before its time."""
    service = Service(folder, workers, WIRED, settings=settings)
    try:
        await asyncio.to_thread(service.start)
        return await _hurt(service, minutes, seed, clients, told or asyncio.Event())
    finally:
        left = await asyncio.to_thread(service.close)
        for line in left:
            print(f"at the end: {line}", file=sys.stderr)


async def _hurt(
    service: Service, minutes: float, seed: int, clients: int, told: asyncio.Event
) -> Report:
    traffic, tormentor = Traffic(service.gateways, questions(), seed), Tormentor(service, seed)
    await traffic.learn()
    started = time.monotonic()
    clients_task = asyncio.create_task(traffic.run(clients))
    torment = asyncio.create_task(tormentor.run())
    ended = asyncio.create_task(told.wait())
    try:
        tasks = {clients_task, torment, ended}
        await asyncio.wait(tasks, timeout=minutes * 60, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended.cancel()
    tormentor.stopping.set()
    await torment
    traffic.stop()
    await clients_task
    took = (time.monotonic() - started) / 60
    await asyncio.to_thread(service.until_complete)
    afterwards = await traffic.check_all()
    leaks = await asyncio.to_thread(service.leaks)
    return Report(took, traffic.outcomes, tormentor.done, afterwards, leaks, service.skipped)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="a new one, for the logs")
    parser.add_argument("--set", action="append", default=[], help="configuration: key=value")
    asked = parser.parse_args()
    settings = dict(pair.split("=", 1) for pair in asked.set)
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="epd-chaos-"))
    folder.mkdir(parents=True, exist_ok=not asked.folder)
    print(f"seed {asked.seed}, logs in {folder}", flush=True)
    report = asyncio.run(_until_told(folder, asked, settings))
    print(report.text())
    return 0 if report.ok else 1


async def _until_told(
    folder: Path, asked: argparse.Namespace, settings: Mapping[str, str]
) -> Report:
    told = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    return await hurt(
        folder, asked.minutes, asked.seed, asked.clients, asked.workers, settings, told
    )


if __name__ == "__main__":
    sys.exit(main())
