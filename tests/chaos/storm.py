"""What clients that leave cost those that stay.

    python -m tests.chaos.storm [--rounds 12] [--seconds 5] [--per-second 20] [--load 0.5]

A steady load of one API key; clients of another key ask for long answers to questions of all
kinds at random times and cancel them at random moments, before the end. Windows without and
with that storm take turns; the steady load sends the same requests in each. Two kinds of
steady load:

    open    requests come at a fixed rate, a share (--load) of the most that the service
            does: is that rate still served, and how much later do answers come?
    closed  so many clients (--clients) that ask again at once. They take all there is, so
            here everything that the storm is given before it leaves is missing

On a machine that other work shares the windows' throughput says how busy that was. What an
answer of the steady load costs the service, in CPU time of all its processes, the storm's
part included, is nearly free of that: where the service has all the machine that it can use,
its throughput is one over it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import psutil

from tests.chaos.outcomes import Outcome
from tests.chaos.questions import Question, questions, unseen
from tests.chaos.service import Place, with_cluster
from tests.chaos.traffic import Traffic
from tests.e2e.cluster import Cluster

STEADY, STORMY = "sk-steady", "sk-stormy"
CLIENTS = "clients"
"""This process, of both kinds, among those whose CPU time is counted."""
SETTINGS = {"model.exact": "true", "gateway.api_keys": f"{STEADY},{STORMY}"}
LONGEST_STAY_S = 0.15
"""A storm's client leaves after a random time up to this."""
LONG = {"max_tokens": 400, "ignore_eos": True}
"""What it asks for: no answer is complete before it leaves."""
NEW = 0.3
"""Share of a storm's requests whose picture no cache knows."""
PROMISED = 0.95
"""Of the open load's throughput is left under the storm."""


@dataclass(frozen=True, slots=True)
class Window:
    """Some seconds of steady load."""

    storm: bool
    seconds: float
    outcomes: Sequence[Outcome]
    left: int
    """Requests that the storm gave up."""
    stayed: int
    """That it had an answer to before."""
    cores: dict[str, float]
    """That each process used."""

    @property
    def rate(self) -> float:
        """Right answers a second."""
        return sum(one.kind == "right" for one in self.outcomes) / self.seconds

    @property
    def cpu_s(self) -> float:
        """What the service worked for one right answer, whatever else it did."""
        used = sum(share for who, share in self.cores.items() if who != CLIENTS)
        return used / self.rate if self.rate else float("inf")

    @property
    def latency_s(self) -> float:
        """Median, of right answers."""
        times = [one.ended - one.started for one in self.outcomes if one.kind == "right"]
        return statistics.median(times) if times else float("inf")

    def __str__(self) -> str:
        left, stayed = self.left / self.seconds, self.stayed / self.seconds
        name = f"storm, {left:.1f} left/s, {stayed:.1f} answered/s" if self.storm else "calm"
        cores = ", ".join(f"{who} {share:.2f}" for who, share in self.cores.items())
        times = f"median {self.latency_s * 1e3:.0f} ms, CPU {self.cpu_s * 1e3:.0f} ms each"
        answers = f"{self.rate:6.2f} answers/s, {times}"
        return f"{name:38} {answers}; cores: {cores}"


def _headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@dataclass(slots=True)
class Storm:
    """Requests that begin at random times, so many a second, and are given up."""

    address: str
    asked: Sequence[Question]
    per_second: float
    draw: random.Random = field(default_factory=lambda: random.Random(5))
    left: int = 0
    stayed: int = 0

    async def blow(self) -> None:
        """Until cancelled."""
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with (
            aiohttp.ClientSession(connector=connector, headers=_headers(STORMY)) as client,
            asyncio.TaskGroup() as tasks,
        ):
            while True:
                await asyncio.sleep(self.draw.expovariate(self.per_second))
                tasks.create_task(self._one(client))

    async def _one(self, client: aiohttp.ClientSession) -> None:
        body = self._question().body(self.draw.random() < 0.5) | LONG
        url = f"http://{self.address}/v1/chat/completions"
        with contextlib.suppress(TimeoutError, aiohttp.ClientError):
            async with asyncio.timeout(self.draw.uniform(0, LONGEST_STAY_S)):
                async with client.post(url, json=body) as reply:
                    await reply.read()
                self.stayed += reply.status == 200
                return
        self.left += 1

    def _question(self) -> Question:
        """Now and then a picture that no cache knows."""
        if self.draw.random() > NEW:
            return self.draw.choice(self.asked)
        return unseen(self.draw)


class Load:
    """The steady key's requests of one window; the same in every window."""

    def __init__(self, traffic: Traffic, gateway: Place, asked: Sequence[Question]) -> None:
        self._traffic = traffic
        self._gateway = gateway
        draw = random.Random(2)
        self._next = ((draw.choice(asked), draw.choice(["whole", "stream"])) for _ in iter(int, 1))
        self.outcomes: list[Outcome] = []

    async def _one(self, client: aiohttp.ClientSession) -> None:
        question, how = next(self._next)
        self.outcomes.append(await self._traffic.ask(client, self._gateway, question, how))

    async def closed(self, clients: int) -> None:
        """Until cancelled: all ask, and ask again."""

        async def again(client: aiohttp.ClientSession) -> None:
            while True:
                await self._one(client)

        async with self._traffic.session() as client, asyncio.TaskGroup() as tasks:
            for _ in range(clients):
                tasks.create_task(again(client))

    async def open(self, per_second: float) -> None:
        """Until cancelled: at even times, whatever became of those before."""
        begun = time.monotonic()
        async with self._traffic.session() as client, asyncio.TaskGroup() as tasks:
            for number in itertools.count(1):
                tasks.create_task(self._one(client))
                await asyncio.sleep(begun + number / per_second - time.monotonic())


def _cpu_s(cluster: Cluster) -> dict[str, float]:
    """CPU time of each process, with its helpers, until now."""
    found = {CLIENTS: sum(psutil.Process().cpu_times()[:2])}
    for member in cluster.members:
        process = psutil.Process(member.pid)
        family = [process, *process.children(recursive=True)]
        found[member.role] = sum(sum(one.cpu_times()[:2]) for one in family)
    return found


@contextlib.asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Trial:
    """Windows over one service."""

    def __init__(self, cluster: Cluster, seconds: float, per_second: float) -> None:
        self._cluster = cluster
        self._seconds = seconds
        self._per_second = per_second
        self._gateway = Place(cluster.gateway, None)
        self._asked = questions()
        self._traffic = Traffic([self._gateway], self._asked, seed=2, headers=_headers(STEADY))

    async def learn(self) -> None:
        await self._traffic.learn()

    async def window(self, storm: bool, per_second: float | None, clients: int) -> Window:
        """`per_second` None: the closed load."""
        load = Load(self._traffic, self._gateway, self._asked)
        wind = Storm(self._cluster.address, self._asked, self._per_second)
        async with contextlib.AsyncExitStack() as running:
            if storm:
                await running.enter_async_context(_beside(wind.blow()))
                await asyncio.sleep(1.0)
            work = load.closed(clients) if per_second is None else load.open(per_second)
            left, stayed, used = wind.left, wind.stayed, _cpu_s(self._cluster)
            await running.enter_async_context(_beside(work))
            await asyncio.sleep(self._seconds)
            left, stayed = wind.left - left, wind.stayed - stayed
            cores = {
                who: (after - used[who]) / self._seconds
                for who, after in _cpu_s(self._cluster).items()
            }
            found = Window(storm, self._seconds, list(load.outcomes), left, stayed, cores)
        faults = [one for one in found.outcomes if one.kind != "right"]
        assert not faults, faults
        # What was given up has ended, so that the next window begins as this one did.
        await asyncio.to_thread(self._cluster.assert_clean)
        return found

    async def windows(
        self, name: str, rounds: int, per_second: float | None, clients: int
    ) -> list[tuple[Window, Window]]:
        """(calm, storm), in alternating order; prints what they show."""
        found = []
        for number in range(rounds):
            order = (False, True) if number % 2 else (True, False)
            pair = {storm: await self.window(storm, per_second, clients) for storm in order}
            for window in pair.values():
                print(f"  {window}", flush=True)
            found.append((pair[False], pair[True]))
        print(
            f"{name}: under the storm {ratio(found):.3f} of the throughput, "
            f"{cheaper(found):.3f} of the answers for the same CPU time, "
            f"{delay(found):.2f} times the median latency (medians of {rounds} pairs)",
            flush=True,
        )
        return found


def ratio(pairs: Sequence[tuple[Window, Window]]) -> float:
    """Median over the rounds: throughput under the storm over that without."""
    return statistics.median(storm.rate / calm.rate for calm, storm in pairs)


def cheaper(pairs: Sequence[tuple[Window, Window]]) -> float:
    return statistics.median(calm.cpu_s / storm.cpu_s for calm, storm in pairs)


def delay(pairs: Sequence[tuple[Window, Window]]) -> float:
    return statistics.median(storm.latency_s / calm.latency_s for calm, storm in pairs)


async def measure(cluster: Cluster, asked: argparse.Namespace) -> float:
    """The open load's ratio; without --load the closed one's."""
    trial = Trial(cluster, asked.seconds, asked.per_second)
    await trial.learn()
    for storm in (False, True):  # caches fill; the gateway gets to know its clients
        await trial.window(storm, None, asked.clients)
    print(f"closed: {asked.clients} clients")
    closed = await trial.windows("closed", asked.rounds, None, asked.clients)
    most = statistics.median(calm.rate for calm, _ in closed)
    rate = asked.load * most
    if not asked.load:
        return ratio(closed)
    print(f"open: {rate:.2f} requests/s, {asked.load:.0%} of the most that the service did")
    found = await trial.windows("open", asked.rounds, rate, asked.clients)
    return ratio(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--per-second", type=float, default=20.0)
    parser.add_argument("--load", type=float, default=0.5)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    asked = parser.parse_args()
    settings = SETTINGS | dict(setting.split("=", 1) for setting in asked.settings)
    kept = with_cluster(settings, lambda cluster: measure(cluster, asked))
    return 0 if kept >= PROMISED else 1


if __name__ == "__main__":
    sys.exit(main())
