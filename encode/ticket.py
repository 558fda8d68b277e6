"""One stream of encode: which image it wants, what it holds."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from encode.cache import Entry
from epd.jobs import EncodeJob, StageTiming
from epd.runtime.streams import Stopwatch
from epd.transfer.arena import Extent
from epd.transfer.lease import Lease


@dataclass(slots=True, eq=False)
class Ticket:
    """Made by `EncodeWorker.submit`, ended by `EncodeWorker.close`."""

    # set by submit
    key: int
    job: EncodeJob
    """Without the file's bytes: those are the work's."""
    nbytes: int
    """Of its rows in the arena."""
    finished: asyncio.Future[None]
    """Done when the rows are in the arena; else holds the error."""
    since: Stopwatch = field(default_factory=Stopwatch)

    # progress
    work: int | None = None
    """Number of the encode that it waits for."""
    entry: Entry[Extent] | None = None
    """Its rows, pinned for it."""
    lease: Lease | None = None
    """From announced on: the pin is the lease's."""

    # timeline
    queue_ms: float = 0.0
    preprocess_ms: float = 0.0
    run_ms: float = 0.0

    @property
    def waits_for(self) -> str:
        """In words."""
        if self.lease is not None:
            return f"its reader, who may read {self.nbytes} bytes"
        return "its announcement" if self.work is None else f"encode {self.work}"

    @property
    def timing(self) -> StageTiming:
        return StageTiming(
            queue_ms=self.queue_ms, run_ms=self.run_ms, preprocess_ms=self.preprocess_ms
        )
