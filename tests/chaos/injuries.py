"""What is done to the service: one injury at a time to a stage, never to all of it."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tests.chaos.service import Place, Service
from tests.e2e.cluster import GATEWAY, STAGES

Injure = Callable[[Place], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Injury:
    what: str
    place: str
    started: float
    ended: float


@dataclass(eq=False)
class Tormentor:
    """Hurts one place after another until told to stop; leaves everything whole."""

    service: Service
    seed: int
    done: list[Injury] = field(default_factory=list)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _busy: set[str] = field(default_factory=set)
    _times: Counter[str] = field(default_factory=Counter)
    """Of each kind that was begun: what came seldom is next, so that short runs have many."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    async def run(self, hands: int = 2) -> None:
        """So many injuries at once, of different stages."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(hands):
                tasks.create_task(self._hand())

    async def _hand(self) -> None:
        while not self.stopping.is_set():
            role = self._random.choice([*STAGES, *STAGES, GATEWAY])
            if role in self._busy:
                await asyncio.sleep(0.1)
                continue
            self._busy.add(role)
            try:
                await self._hurt(self._random.choice(self.service.of(role)))
            finally:
                self._busy.discard(role)
            await asyncio.sleep(self._random.uniform(0.3, 2.0))

    async def _hurt(self, place: Place) -> None:
        ways = self._ways(place)
        seldom = min(self._times[what] for what in ways)
        what = self._random.choice([what for what in ways if self._times[what] == seldom])
        self._times[what] += 1
        started = time.monotonic()
        place.hurt.append((started, float("inf")))
        await ways[what](place)
        # What its injury has broken may end a little later.
        place.hurt[-1] = (started, time.monotonic() + 5.0)
        self.done.append(Injury(what, place.name, started, time.monotonic()))

    def _ways(self, place: Place) -> dict[str, Injure]:
        ways: dict[str, Injure] = {
            "killed": self._kill,
            "stopped": self._stop,
            "restarted": self._restart,
        }
        if place.node is not None:
            ways |= {"cut off": self._cut, "certificates renewed": self._renew}
        if place.node is not None and place.worker.role in ("prefill", "decode"):
            ways["one bad edge"] = self._separate
        if place.wire is not None:
            ways |= {"slow and lossy": self._slow, "slow, lossy too": self._slow}
        return ways

    async def _kill(self, place: Place) -> None:
        await asyncio.to_thread(place.worker.end, signal.SIGKILL)
        await self._pause(0.2, 2.0)
        await asyncio.to_thread(self.service.again, place)

    async def _restart(self, place: Place) -> None:
        """As a rolling upgrade does: SIGTERM, its grace, and again."""
        place.worker.send(signal.SIGTERM)
        code = await asyncio.to_thread(place.worker.finish)
        assert code == 0, f"{place.name} ended with {code} after SIGTERM"
        await asyncio.to_thread(self.service.again, place)

    async def _stop(self, place: Place) -> None:
        place.worker.send(signal.SIGSTOP)
        await self._pause(0.3, 8.0)
        place.worker.send(signal.SIGCONT)

    async def _cut(self, place: Place) -> None:
        assert self.service.network is not None
        assert place.node is not None
        self.service.network.cut(place.node.link())
        await self._pause(0.3, 8.0)
        self.service.network.heal(place.node.link())

    async def _separate(self, place: Place) -> None:
        """This reader and one of its owners; both still reach the gateways."""
        network = self.service.network
        assert network is not None
        assert place.node is not None
        owner = self._random.choice(
            self.service.of("encode" if place.worker.role == "prefill" else "prefill")
        )
        assert owner.node is not None
        ends = place.node.link(), owner.node.link()
        network.separate(*ends)
        await self._pause(1.0, 8.0)
        network.unite(*ends)

    async def _renew(self, place: Place) -> None:
        await asyncio.to_thread(self.service.renew)

    async def _slow(self, place: Place) -> None:
        assert place.wire is not None
        place.wire.set(self._random.uniform(5, 60), 0.01)
        await self._pause(5.0, 15.0)
        place.wire.set(0.0, 0.0)

    async def _pause(self, least_s: float, most_s: float) -> None:
        await asyncio.sleep(self._random.uniform(least_s, most_s))
