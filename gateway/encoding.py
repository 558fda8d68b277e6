"""The encode calls of one attempt: one for each image that prefill lacks.

open -> job -> ItemReady -> (prefill is told) -> EmbeddingFetched -> half-close
  ^               │
  └─ its encoder died, another is there
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from epd.errors import ErrorKind
from epd.jobs import Stage
from gateway.ahead import Ahead
from gateway.jobs import AttemptJobs
from gateway.progress import Progress, Stages, broken
from gateway.streams import StageFault, StageStream
from gateway.worker import Worker
from protos.epd.v1 import prefill_pb2

_TRIES = 3
_IMAGE_FAULTS = frozenset({ErrorKind.INVALID_IMAGE, ErrorKind.IMAGE_TOO_LARGE})
Announce = Callable[[prefill_pb2.EmbeddingReady], None]


class Encoding:
    """Owns the streams to encoders."""

    def __init__(
        self,
        stages: Stages,
        jobs: AttemptJobs,
        progress: Progress,
        deadline: float,
        ahead: Ahead,
    ) -> None:
        self._stages = stages
        self._jobs = jobs
        self._progress = progress
        self._deadline = deadline
        self._ahead = ahead
        self.streams: list[StageStream] = []
        self._leases: dict[int, StageStream] = {}
        """By image: who announced its embedding. Other encoders have nothing to lose."""
        self._holding: dict[int, asyncio.Task[None]] = {}
        self._doubted = False
        self.near: Worker | None = None
        """Where the request is prefilled."""

    def expect(self) -> None:
        """Open a call ahead if prefill will surely lack an image: one that was never sent to
        the only encoder."""
        registry = self._stages.registry
        encoder = registry.only(Stage.ENCODE) if self._jobs.request.items else None
        if encoder is not None and not all(
            registry.knows(item.digest, encoder) for item in self._jobs.request.items
        ):
            self._ahead.open(Stage.ENCODE)

    async def run(self, index: int, announce: Announce) -> None:
        """Encode one image, tell prefill of it (`announce`), hold its lease until `fetched`.

        Raises:
            StageFault: it can't be encoded, or the lease broke before it was fetched.
            EpdError: no encoder is live.
        """
        timeline = self._progress.timeline
        timeline.begin(f"encode[{index}]")
        ready = await self._encoded(index)
        timeline.end(f"encode[{index}]")
        timeline.begin(f"embedding transfer[{index}]")
        announce(ready)
        stream = self._leases[index]
        self._holding[index] = asyncio.create_task(_until_end(stream))
        try:
            await self._holding[index]
        except asyncio.CancelledError:
            if stream.half_closed:
                return  # by `fetched`
            self._holding[index].cancel()
            raise
        raise broken(stream, "ended before its embedding was fetched")

    def fetched(self, event: prefill_pb2.EmbeddingFetched) -> None:
        """Prefill has the rows: the lease is over."""
        name = f"embedding transfer[{event.index}]"
        share_ms = event.transfer_ms or None
        self._progress.timeline.end(name, event.transfer_bytes, share_ms)
        if (stream := self._leases.get(event.index)) is not None:
            stream.finish()
            self._holding[event.index].cancel()

    def forget_tasks(self) -> None:
        """All of `run` are done."""
        self._holding.clear()

    def doubt(self) -> None:
        """Prefill found damaged rows. A lease that is not ended cleanly tells the encoder
        to give those rows to nobody else."""
        self._doubted = True

    def close(self, clean: bool) -> None:
        """End what is open; `clean` if prefill reads nothing any more."""
        leased = set(self._leases.values())
        for stream in self.streams:
            if clean and not self._doubted and stream in leased:
                stream.finish()
            else:
                stream.abort()

    async def _encoded(self, index: int) -> prefill_pb2.EmbeddingReady:
        """On another encoder if one dies or leaves: prefill was not told yet."""
        left = _TRIES
        while True:
            stream = self._open(index)
            try:
                ready = await self._result(stream)
            except StageFault as fault:
                digest = self._jobs.request.items[index].digest
                self._stages.registry.not_encoded(digest, stream.worker)
                left -= not fault.handed_back
                if not (left and self._may_move(fault, index)):
                    raise
            else:
                self._leases[index] = stream
                return ready

    def _may_move(self, fault: StageFault, index: int) -> bool:
        if fault.error.kind in _IMAGE_FAULTS:
            fault.error.param = self._jobs.request.image_param(index)
            return False
        self._progress.blame(fault)
        avoid = self._progress.avoid[Stage.ENCODE]
        others = self._stages.registry.has_other(Stage.ENCODE, avoid)
        return fault.error.mapping.retryable and others

    def _open(self, index: int) -> StageStream:
        request = self._jobs.request
        avoid, item = self._progress.avoid[Stage.ENCODE], request.items[index]
        worker = self._stages.registry.choose_encoder(item.digest, item.rows, avoid, self.near)
        stream = self._ahead.take(Stage.ENCODE, worker) or self._stages.open(
            Stage.ENCODE, worker, self._deadline, request.request_id
        )
        self.streams.append(stream)
        stream.send(self._jobs.encode(index))
        return stream

    async def _result(self, stream: StageStream) -> prefill_pb2.EmbeddingReady:
        while (event := await stream.next()) is not None:
            if event.WhichOneof("kind") == "ready":
                ready = event.ready
                return prefill_pb2.EmbeddingReady(index=ready.index, handle=ready.handle)
        raise broken(stream, "ended without an embedding")


async def _until_end(stream: StageStream) -> None:
    while (await stream.next()) is not None:
        pass
