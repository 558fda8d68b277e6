"""Drives one target with one load for one round, and keeps what each request showed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from epd.bench.client import Transport, send
from epd.bench.content import Words, body
from epd.bench.machine import Meter, Usage
from epd.bench.record import Record
from epd.bench.workload import Load, Shape, Timed, faster, fresh, poisson


@dataclass(slots=True)
class Target:
    """A server that is measured."""

    name: str
    url: str
    transport: Transport
    model: str = ""
    words: Words = field(default_factory=Words)
    pids: tuple[int, ...] = ()
    """Its processes, where they are known and on this machine."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields of its requests, over the workload's; None takes one out."""


@dataclass(frozen=True, slots=True)
class Limits:
    timeout_s: float = 300.0
    """Of one request."""
    max_in_flight: int = 512
    """Of an open loop; more wait in the client, and their waiting counts."""
    keep_connections: bool = True


@dataclass(frozen=True, slots=True)
class Round:
    """What one target did under one load, once."""

    target: str
    load: Load
    number: int
    records: list[Record]
    usage: Usage

    @property
    def origin(self) -> float:
        return min(record.scheduled for record in self.records)

    @property
    def wall_s(self) -> float:
        return max(record.ended for record in self.records) - self.origin


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one round, and how they are worded."""

    shapes: Sequence[Shape] = ()
    trace: Sequence[Timed] = ()
    """Instead of `shapes`, for a load of kind "trace"."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def timed(self, load: Load, number: int) -> list[Timed]:
        """The same for every target, other texts and pictures in every round."""
        rng = random.Random(f"{self.seed} {number} {load}")
        timed = [Timed(0.0, shape) for shape in self.shapes]
        if load.how == "trace":
            timed = faster(self.trace, load.value)
        elif load.how == "rate":
            timed = poisson(self.shapes, load.value, rng)
        shapes = fresh([t.shape for t in timed], rng.getrandbits(62))
        return [Timed(t.at_s, s) for t, s in zip(timed, shapes, strict=True)]


async def run_round(
    target: Target, load: Load, number: int, workload: Workload, limits: Limits
) -> Round:
    """Bodies are made before the clock starts: pictures cost CPU."""
    timed = workload.timed(load, number)
    rng = random.Random(f"{workload.seed} {number} {load} words")
    extra = {**workload.extra, **target.extra}
    bodies = [body(t.shape, target.model, target.words, rng, extra) for t in timed]
    records = [
        Record(
            target.name, str(load), number, index, t.shape.kind,
            t.shape.output_tokens, len(t.shape.pictures), scheduled=0.0,
        )
        for index, t in enumerate(timed)
    ]  # fmt: skip

    async def one(index: int) -> None:
        await send(target.transport, bodies[index], records[index], limits.timeout_s)

    meter = Meter(target.pids)
    if load.how == "concurrency":
        await _closed(records, one, max(1, int(load.value)))
    else:
        await _open(records, [t.at_s for t in timed], one, limits.max_in_flight)
    return Round(target.name, load, number, records, meter.read())


Send = Callable[[int], Awaitable[None]]


async def _closed(records: list[Record], one: Send, concurrency: int) -> None:
    """So many clients, each with one request at a time."""
    clock = asyncio.get_running_loop().time
    numbers = iter(range(len(records)))

    async def client() -> None:
        for index in numbers:
            records[index].scheduled = clock()
            await one(index)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(records))):
            group.create_task(client())


async def _open(records: list[Record], at: list[float], one: Send, most: int) -> None:
    """Each at its time, whether or not others are answered."""
    clock = asyncio.get_running_loop().time
    room = asyncio.Semaphore(most)
    start = clock()

    async def request(index: int) -> None:
        async with room:
            await one(index)

    async with asyncio.TaskGroup() as group:
        for index, record in enumerate(records):
            record.scheduled = start + at[index]
            # Even a sleep of nothing lets the loop read answers.
            await asyncio.sleep(max(0.0, record.scheduled - clock()))
            group.create_task(request(index))
