"""Thousands of requests, three of ten left by their clients at random moments: what grows?

    python -m tests.chaos.soak --requests 10000 [--aborted 0.3] [--clients 8]

Every answer that is waited for is checked. At the end every block, lease and queue place
must be back, and after the warm-up the memory of all processes together may grow by less
than 1 MiB in 1,000 requests.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import psutil

from tests.chaos.outcomes import Outcomes
from tests.chaos.questions import Question, questions, unseen
from tests.chaos.service import Place, with_cluster
from tests.chaos.traffic import Traffic
from tests.e2e.cluster import Cluster

SETTINGS = {
    "model.exact": "true",
    "kv.prefill_tokens": "4096",
    "kv.decode_tokens": "4096",
    "encode.cache_mib": "4",
    "encode.arena_mib": "16",
    "prefill.landing_mib": "16",
}
"""Caches that are full, and evict, before the warm-up ends."""
SAMPLES = 40
WARM_UP = 0.3
"""Share of the requests that are not measured: caches fill, allocators settle."""
MOST_MIB = 1.0
"""That all processes together may grow by in 1,000 requests."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Memory over requests, of one process or of all."""

    name: str
    points: tuple[tuple[int, float], ...]
    """(requests sent, MiB resident)"""

    @property
    def mib_per_1000(self) -> float:
        """Slope of the line through the points (least squares)."""
        count = len(self.points)
        mean_x = sum(x for x, _ in self.points) / count
        mean_y = sum(y for _, y in self.points) / count
        above = sum((x - mean_x) * (y - mean_y) for x, y in self.points)
        return 1000 * above / sum((x - mean_x) ** 2 for x, _ in self.points)


@dataclass(slots=True)
class Result:
    """Of one run."""

    outcomes: Outcomes
    growth: list[Growth]
    left: list[str]
    seconds: float

    @property
    def total(self) -> Growth:
        sums = [
            (points[0][0], sum(y for _, y in points))
            for points in zip(*(one.points for one in self.growth), strict=True)
        ]
        return Growth("all", tuple(sums))

    def text(self) -> str:
        counts = self.outcomes.counts
        lines = [
            f"{len(self.outcomes.all)} requests in {self.seconds:.0f} s: "
            + ", ".join(f"{n} {kind}" for kind, n in counts.most_common()),
            *(
                f"{one.name}: {one.points[0][1]:.0f} -> {one.points[-1][1]:.0f} MiB, "
                f"{one.mib_per_1000:+.2f} MiB in 1,000 requests"
                for one in (*self.growth, self.total)
            ),
            f"left over: {'; '.join(self.left) or 'nothing'}",
        ]
        return "\n".join([*lines, *(f"! {fault}" for fault in self.outcomes.faults[:10])])


async def soak(cluster: Cluster, requests: int, aborted: float, clients: int) -> Result:
    """Send so many requests to a running service."""
    gateway = Place(cluster.gateway, None)
    asked, seed = questions(), 11
    traffic = Traffic([gateway], asked, seed)
    await traffic.learn()
    numbers, draw = iter(range(requests)), random.Random(seed)
    samples: list[tuple[int, dict[str, float]]] = []
    every = max(1, requests // SAMPLES)

    async def client(session: aiohttp.ClientSession) -> None:
        for number in numbers:
            if number % every == 0:
                memory = await asyncio.to_thread(_memory, cluster)
                print(f"{number}: {sum(memory.values()):.1f} MiB", flush=True)
                if number >= WARM_UP * requests:
                    samples.append((number, memory))
            await _one(traffic, session, gateway, asked, draw, aborted)

    started = time.monotonic()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        await asyncio.gather(*(client(session) for _ in range(clients)))
    seconds = time.monotonic() - started
    left = await asyncio.to_thread(_left, cluster)
    growth = [
        Growth(name, tuple((number, memory[name]) for number, memory in samples))
        for name in samples[0][1]
    ]
    return Result(traffic.outcomes, growth, left, seconds)


async def _one(
    traffic: Traffic,
    session: aiohttp.ClientSession,
    gateway: Place,
    asked: Sequence[Question],
    draw: random.Random,
    aborted: float,
) -> None:
    # Some are answered before they leave: more must try.
    behind = traffic.outcomes.counts["aborted"] < aborted * len(traffic.outcomes.all)
    leaves = aborted > 0 and draw.random() < (0.6 if behind else 0.2)
    how = draw.choice(["leave", "leave early"] if leaves else ["whole", "stream", "grpc"])
    if leaves and draw.random() < 0.3:
        # A picture that no cache knows; nobody waits for its answer.
        question = unseen(draw)
        traffic.expected.setdefault(question.name, (("", ""),))
        outcome = await traffic.ask(session, gateway, question, "leave early")
        if outcome.kind == "wrong":  # it was quick enough to answer, and nobody knows what
            return
    else:
        outcome = await traffic.ask(session, gateway, draw.choice(asked), how)
    traffic.outcomes.add(outcome)


def _memory(cluster: Cluster) -> dict[str, float]:
    """MiB of each member with its children."""
    found = {}
    for member in cluster.members:
        process = psutil.Process(member.pid)
        family = [process, *process.children(recursive=True)]
        found[f"{member.role}-{member.index}"] = sum(map(_resident, family)) / 2**20
    return found


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:  # a helper that was replaced
        return 0


def _left(cluster: Cluster) -> list[str]:
    try:
        cluster.assert_clean()
    except AssertionError as left:
        return [str(left)]
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--aborted", type=float, default=0.3)
    parser.add_argument("--clients", type=int, default=8)
    asked = parser.parse_args()
    result = with_cluster(
        SETTINGS, lambda cluster: soak(cluster, asked.requests, asked.aborted, asked.clients)
    )
    print(result.text())
    grows = result.total.mib_per_1000 >= MOST_MIB
    return 1 if result.outcomes.faults or result.left or grows else 0


if __name__ == "__main__":
    sys.exit(main())
