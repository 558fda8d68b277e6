"""What the workers of all stages have in common: tickets, memory, steps, tasks beside them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, Generic, Protocol, TypeVar

from epd.errors import EpdError, ErrorKind
from epd.jobs import Stage
from epd.runtime.group import Wait
from epd.runtime.memory import OwnedMemory
from epd.runtime.steps import StepLoop
from epd.runtime.streams import Stopwatch, Streams


class _Job(Protocol):
    @property
    def request_id(self) -> str: ...


class _Ticket(Protocol):
    @property
    def job(self) -> _Job: ...
    @property
    def since(self) -> Stopwatch: ...
    @property
    def waits_for(self) -> str: ...


TicketT = TypeVar("TicketT", bound=_Ticket)


class StageWorker(ABC, Generic[TicketT]):
    """A part of `epd.runtime.group.Worker`; a stage's worker adds what it does. All runs on
    the event loop."""

    stage: Stage

    def __init__(self, memory: OwnedMemory, steps: StepLoop) -> None:
        self.memory = memory
        self.steps = steps
        self.streams = Streams(self.stage)
        self._tickets: dict[int, TicketT] = {}
        """By the worker's own number of the request."""
        self._background: set[asyncio.Task[None]] = set()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run something that may outlive the call that began it."""
        task = asyncio.create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _common_state(self) -> dict[str, object]:
        """The part of `state` that every worker has."""
        return {
            "streams": len(self.streams),
            "tickets": len(self._tickets),
            "steps": self.steps.steps,
            "background": len(self._background),
            "tasks": len(asyncio.all_tasks()),
            **self.memory.state(),
        }

    def hand_back(self) -> None:
        """What waits and was not started never will be: tell it so, in a typed way."""
        for ticket in list(self._tickets.values()):
            self.recall(ticket)

    def recall(self, ticket: TicketT) -> None:
        """Its gateway has another worker for it: give it back, unless it is begun."""
        if self._waits(ticket):
            reason = f"this {self.stage} worker is leaving"
            self._fail(ticket, EpdError(ErrorKind.NOT_STARTED, reason, retry_after_s=1.0))

    @abstractmethod
    def _waits(self, ticket: TicketT) -> bool:
        """Whether nothing was begun for it."""

    @abstractmethod
    def _fail(self, ticket: TicketT, error: EpdError) -> None:
        """End its stream with this error."""

    def healthy(self) -> bool:
        return self.memory.healthy()

    def reaches_peers(self) -> bool:
        return self.memory.reaches_peers()

    def waits(self) -> list[Wait]:
        return [
            (ticket.job.request_id, ticket.since.ms / 1e3, ticket.waits_for)
            for ticket in self._tickets.values()
        ]

    def tick(self) -> None:
        if self.memory.tick():
            self.steps.poke()

    def start(self) -> asyncio.Task[None]:
        return self.steps.start()
