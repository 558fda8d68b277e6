"""What the client itself can take: `epd bench ceiling`.

A figure of a server is only worth something well below this.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from epd.bench.campaign import connect
from epd.bench.client import open_session
from epd.bench.load import Limits, Workload, run_round
from epd.bench.workload import Load, Shape


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Of one client process, with so many streams at once."""

    streams: int
    events_s: float
    """Events read a second, by the clock; the scripted server has a core too."""
    cpu_us: float
    """Client's CPU time an event: its reciprocal is the ceiling of one whole core."""


@contextmanager
def scripted_server(events: int, first_s: float = 0.0, gap_s: float = 0.0) -> Iterator[str]:
    """A process of its own; gives its base URL."""
    command = [sys.executable, "-m", "epd.bench.scripted", "--events", str(events)]
    command += ["--first-s", str(first_s), "--gap-s", str(gap_s)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()
            process.wait(10)


async def measure(url: str, events: int, streams: int, requests: int) -> Ceiling:
    """Drive the scripted server at `url` once."""
    workload = Workload([Shape(16, events)] * requests)
    async with open_session(60.0) as http:
        target = await connect("scripted", url, http)
        done = await run_round(target, Load("concurrency", streams), 0, workload, Limits(60.0))
    failed = [record.error for record in done.records if not record.ok]
    assert not failed, f"the scripted server failed: {failed[0]}"
    read = sum(len(record.arrivals) for record in done.records)
    cpu_s = done.usage.client * done.wall_s
    return Ceiling(streams, read / done.wall_s, cpu_s / read * 1e6)


def run(streams: tuple[int, ...] = (1, 64), events: int = 512) -> list[Ceiling]:
    """Long answers, at several numbers of streams."""
    with scripted_server(events) as url:
        return [asyncio.run(measure(url, events, n, max(32, 2 * n))) for n in streams]
