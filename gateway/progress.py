"""What the attempts of one request share, and what all requests share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from epd.config import Config
from epd.errors import EpdError, ErrorKind
from epd.jobs import FinishReason, SampledToken, Stage
from epd.obs import metrics
from gateway.outcomes import STAGE
from gateway.prefixes import beginnings
from gateway.request import Accepted, Ended, NewTokens, PlannedRequest
from gateway.streams import Connections, StageFault, StageStream
from gateway.timeline import Timeline
from gateway.worker import Worker
from gateway.workers import Registry

_DEADLINE_SLACK_S = 1.0
"""The gateway's own clock ends a request; gRPC's deadline comes this much later, so
that an orderly teardown fits before it."""


@dataclass(frozen=True, slots=True)
class Stages:
    """What attempts share: who serves, how to reach them, under which limits."""

    registry: Registry
    connections: Connections
    config: Config
    fingerprint: str
    image_token_id: int

    @property
    def cancel_bound_s(self) -> float:
        return self.config.gateway.cancel_bound_s

    def beginning(self, request: PlannedRequest) -> Sequence[bytes]:
        """What the router knows this prompt by; nothing where it has no choice."""
        if not self.registry.has_choice:
            return ()
        return beginnings(request, self.image_token_id, self.config.kv.block_tokens)

    def open(self, stage: Stage, worker: Worker, deadline: float, request_id: str) -> StageStream:
        """Start a call under the request's deadline (on the loop's clock)."""
        left = deadline - asyncio.get_running_loop().time()
        return self.connections.open(stage, worker, left + _DEADLINE_SLACK_S, request_id)


class Progress:
    """What of one choice survives an attempt: the output so far, and whom to avoid."""

    def __init__(self, events: asyncio.Queue[Any], timeline: Timeline, choice: int = 0) -> None:
        self.choice = choice
        self.output: list[SampledToken] = []
        self.reason: FinishReason | None = None
        """Set when the output is complete."""
        self.ending: FinishReason | None = None
        """Why it is, from decode's last token on; with decode's last word it is `reason`."""
        self.accepted = False
        self._told = False
        self.avoid: dict[Stage, list[Worker]] = {stage: [] for stage in Stage}
        self.timeline = timeline
        self._events = events
        self._extending = asyncio.Lock()
        self._first_s = self._last_s = 0.0
        """When its first and its last token came, on the timeline."""

    async def accept(self, cached_tokens: int) -> None:
        if not self.accepted:
            self.accepted = True
            await self._events.put(Accepted(cached_tokens))

    def offer(self, first_index: int, tokens: list[SampledToken]) -> bool:
        """As `extend`, if it can be done here and now: no call before is waiting, the
        client keeps up, and nothing is wrong. Most tokens come this way."""
        known = len(self.output) - first_index
        if known < 0 or self._extending.locked() or self._events.full():
            return False
        if fresh := tokens[known:] if known else tokens:
            self._events.put_nowait(NewTokens(tuple(fresh), self.choice))
            self._add(fresh)
        return True

    async def extend(self, first_index: int, tokens: list[SampledToken]) -> None:
        """Add tokens to the output: a repeated one is dropped, a gap is a fault.

        One at a time, in order of the calls; cancelled while the client is slow, it has
        added nothing: what is in `output` was delivered.
        """
        async with self._extending:
            known = len(self.output) - first_index
            if known < 0:
                reason = f"tokens are missing before index {first_index}"
                raise EpdError(ErrorKind.INTERNAL, reason)
            if fresh := tokens[known:]:
                await self._events.put(NewTokens(tuple(fresh), self.choice))
                self._add(fresh)

    def _add(self, fresh: list[SampledToken]) -> None:
        self._last_s = self.timeline.elapsed_s
        if not self.output:
            self._first_s = self._last_s
        self.output.extend(fresh)

    def _tell(self) -> bool:
        """Whether the end of the output is news; then it is measured."""
        if self._told:
            return False
        self._told = True
        if len(self.output) > 1:
            each_s = (self._last_s - self._first_s) / (len(self.output) - 1)
            metrics.TOKEN_SECONDS.labels(STAGE).observe(each_s)
        return True

    def stop(self) -> None:
        """The gateway ended the output itself (a stop string) and knows it."""
        self.reason = FinishReason.STOP
        self._tell()

    async def end(self) -> None:
        """Say that the output is complete; once."""
        assert self.reason is not None
        if self._tell():
            await self._events.put(Ended(self.reason, self.choice))

    def blame(self, fault: StageFault) -> None:
        """Rather avoid this worker from now on."""
        self.avoid[fault.stage].append(fault.worker)
        if fault.lost and fault.error.kind is ErrorKind.STAGE_UNAVAILABLE:
            fault.worker.suspect = True


def broken(stream: StageStream, what: str) -> StageFault:
    """A peer that doesn't keep to the protocol; trying again would not help."""
    error = EpdError(ErrorKind.INTERNAL, f"{stream.stage} {what}")
    return StageFault(error, stream.stage, stream.worker, lost=False)
