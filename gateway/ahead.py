"""Calls to stages that are opened before it is known what they will be asked.

    request checked ──> prefill's call opens    prompt is built ──> job
    job sent        ──> an encoder's call opens prefill answers: which images it lacks ──> job

Opening a call takes half as long as building a prompt, here and in the stage, and both can go
on at once. What is not needed after all is cancelled: a stage has begun nothing before it has
the job. Only where there is no choice: which worker is best, the prompt tells.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from epd.jobs import Stage
from gateway.progress import Stages
from gateway.streams import StageStream
from gateway.worker import Worker

_SETTLE_S = 1.0


class Ahead:
    """The open calls of one request that have no job yet, at most one a stage."""

    def __init__(self, stages: Stages, deadline: float, request_id: str) -> None:
        """`deadline` is on the event loop's clock."""
        self._stages = stages
        self._deadline = deadline
        self._request_id = request_id
        self._open: dict[Stage, StageStream] = {}
        self._too_late: set[Stage] = set()
        self._given_up: list[StageStream] = []

    def open(self, stage: Stage) -> None:
        """Open a call, if there is but one worker that it could go to, and none was wanted
        so far."""
        worker = self._stages.registry.only(stage)
        if worker is None or stage in self._too_late:
            return
        self._too_late.add(stage)
        self._open[stage] = self._stages.open(stage, worker, self._deadline, self._request_id)

    def take(self, stage: Stage, worker: Worker) -> StageStream | None:
        """The call to this worker, if one was opened and is still good; the caller's now.
        One that is not is given up: the request may take long, and nobody comes for it."""
        self._too_late.add(stage)
        stream = self._open.pop(stage, None)
        if stream is None:
            return None
        over = stream.ended or stream.lost or worker.draining
        if stream.worker is worker and not over:
            return stream
        stream.abort()
        self._given_up.append(stream)
        return None

    def close(self) -> list[StageStream]:
        """Give up those that nobody took. The caller has to `settle` all that were."""
        self._too_late.update(Stage)
        left, self._given_up = [*self._given_up, *self._open.values()], []
        for stream in self._open.values():
            stream.abort()
        self._open.clear()
        return left


async def settled(streams: Sequence[StageStream]) -> None:
    """See calls end, of which nothing more is wanted."""
    await asyncio.gather(*(stream.settle(_SETTLE_S) for stream in streams))
