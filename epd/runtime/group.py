"""The workers of one process, seen from outside as one: one address, one epoch, one health."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from epd.errors import EpdError, ErrorKind
from epd.jobs import Stage
from epd.runtime.steps import StepLoop
from epd.runtime.streams import Streams


@dataclass(frozen=True, slots=True)
class Description:
    """What a worker tells gateways about itself, once. 0 or "": it has no such thing."""

    epoch: int
    fingerprint: str
    dtype: str
    numerics_id: str
    kv_layout: str = ""
    kv_block_shape: tuple[int, ...] = ()
    kv_tokens: int = 0
    max_context: int = 0
    max_rows: int = 0
    max_queue: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """What a worker tells gateways with every heartbeat."""

    running: int
    waiting: int
    kv_tokens_free: int = 0
    queued_rows: int = 0
    us_per_row: float = 0.0


Wait = tuple[str, float, str]
"""(request id, seconds since it came, what it waits for)"""


class Worker(Protocol):
    """What a process needs of a stage's worker."""

    stage: Stage
    streams: Streams
    steps: StepLoop

    def describe(self) -> Description: ...
    def load(self) -> Load: ...
    def state(self) -> Mapping[str, object]:
        """Counts for /metrics and /debug/state; all zero-able ones are zero when idle."""
        ...

    def check_integrity(self) -> None:
        """Assert the bookkeeping of memory and queues."""
        ...

    def healthy(self) -> bool:
        """False where something below is stuck, e.g. the transfer engine."""
        ...

    def reaches_peers(self) -> bool:
        """False while the transfer engine reaches no peer at all."""
        ...

    def waits(self) -> Iterable[Wait]:
        """What each request waits for now; for a person who looks at a stalled worker."""
        ...

    def tick(self) -> None:
        """Called a few times a second: quarantines end here."""
        ...

    def hand_back(self) -> None:
        """Tell all that waits and was not started that it never will be."""
        ...

    def start(self) -> asyncio.Task[None]:
        """Start working; the task ends only by a bug of ours, which it raises."""
        ...

    async def shut_down(self) -> None: ...


class WorkerGroup:
    """One worker of each of some stages."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        assert workers
        self.workers = tuple(workers)
        self.name = "+".join(worker.stage for worker in workers)

    @property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(worker.stage for worker in self.workers)

    # -- what gateways are told ---------------------------------------------

    def describe(self) -> Description:
        """What all can do: the smallest of each limit."""
        facts = [worker.describe() for worker in self.workers]
        first = facts[0]
        assert all((f.epoch, f.fingerprint) == (first.epoch, first.fingerprint) for f in facts)
        return Description(
            epoch=first.epoch,
            fingerprint=first.fingerprint,
            dtype=first.dtype,
            numerics_id=next((f.numerics_id for f in facts if f.numerics_id), ""),
            kv_layout=next((f.kv_layout for f in facts if f.kv_layout), ""),
            kv_block_shape=next((f.kv_block_shape for f in facts if f.kv_block_shape), ()),
            kv_tokens=_least(f.kv_tokens for f in facts),
            max_context=_least(f.max_context for f in facts),
            max_rows=_least(f.max_rows for f in facts),
            max_queue=_least(f.max_queue for f in facts),
        )

    def load(self) -> Load:
        loads = [worker.load() for worker in self.workers]
        return Load(
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            kv_tokens_free=_least(load.kv_tokens_free for load in loads),
            queued_rows=sum(load.queued_rows for load in loads),
            us_per_row=sum(load.us_per_row for load in loads),
        )

    @property
    def steps(self) -> int:
        return sum(worker.steps.steps for worker in self.workers)

    # -- what operators see -------------------------------------------------

    def observed(self) -> Mapping[str, object]:
        """The workers' counts, and whether their bookkeeping holds (looked at when all are
        idle). Of several, each stage's own under `stages`; what they share (leases, tasks,
        KV blocks) is in each."""
        states = {str(worker.stage): worker.state() for worker in self.workers}
        integrity = self._integrity(states.values())
        if len(states) == 1:
            return {**next(iter(states.values())), "integrity": integrity}
        tasks = max(int(str(state["tasks"])) for state in states.values())
        return {"stages": states, "tasks": tasks, "integrity": integrity}

    def _integrity(self, states: Iterable[Mapping[str, object]]) -> str:
        # A request that is gone holds its blocks until the running step or its last read ends.
        running = any(worker.steps.in_step for worker in self.workers)
        if running or any(state["tickets"] or state.get("reads_outstanding") for state in states):
            return "busy"
        try:
            for worker in self.workers:
                worker.check_integrity()
        except AssertionError as broken:
            return f"broken: {broken}"
        return "ok"

    # -- life ---------------------------------------------------------------

    def start(self) -> list[asyncio.Task[None]]:
        return [worker.start() for worker in self.workers]

    def tick(self) -> None:
        for worker in self.workers:
            worker.tick()

    def healthy(self) -> bool:
        return all(worker.healthy() for worker in self.workers)

    def reaches_peers(self) -> bool:
        return all(worker.reaches_peers() for worker in self.workers)

    def waits(self) -> list[tuple[Stage, Wait]]:
        return [(worker.stage, wait) for worker in self.workers for wait in worker.waits()]

    def stalled_for(self) -> float:
        """Of the worker that has made no step for longest."""
        return max(worker.steps.stalled_for() for worker in self.workers)

    @property
    def streams(self) -> int:
        return sum(len(worker.streams) for worker in self.workers)

    async def drain(self, grace_s: float) -> bool:
        """Take nothing new, let what runs end; false if some still runs after `grace_s`.

        A request that is in prefill here may still need this process's encode and decode:
        they refuse new streams when prefill has none any more.
        """
        first = [worker for worker in self.workers if worker.stage is Stage.PREFILL]
        later = [worker for worker in self.workers if worker.stage is not Stage.PREFILL]
        try:
            async with asyncio.timeout(grace_s):
                for workers in (first, later):
                    for worker in workers:
                        worker.streams.refuse_new()
                    for worker in workers:
                        await worker.streams.finished()
        except TimeoutError:
            return False
        return True

    async def end_streams(self, bound_s: float) -> None:
        """End what still runs or waits, with a reason."""
        for worker in self.workers:
            worker.streams.refuse_new()
            worker.hand_back()
            reason = f"the {worker.stage} worker stopped"
            stopped = EpdError(ErrorKind.STAGE_UNAVAILABLE, reason, retry_after_s=1.0)
            worker.streams.fail_all(stopped)
        try:
            async with asyncio.timeout(bound_s):
                for worker in self.workers:
                    await worker.streams.finished()
        except TimeoutError:
            return

    async def shut_down(self) -> None:
        for worker in self.workers:
            await worker.shut_down()


def _least(values: Iterable[int]) -> int:
    """Of those that are there (not 0)."""
    return min((value for value in values if value), default=0)
