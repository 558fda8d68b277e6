"""One image in encode: what is known of it, what it holds."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from epd.jobs import EncodeJob, StageTiming
from epd.models.processor import PreparedImage
from epd.runtime.streams import Stopwatch
from epd.transfer.arena import Extent
from epd.transfer.lease import Lease


@dataclass(slots=True, eq=False)
class Ticket:
    """Made by `EncodeWorker.submit`, ended by `EncodeWorker.close`."""

    # set by submit
    key: int
    job: EncodeJob
    """Without the file's bytes once they are decoded."""
    nbytes: int
    """Of its rows in the arena."""
    file_bytes: int
    """Of the file that it still holds."""
    queue_depth: int
    finished: asyncio.Future[None]
    """Done when the rows are in the arena; else holds the error."""
    since: Stopwatch = field(default_factory=Stopwatch)

    # progress
    task: asyncio.Task[None] | None = None
    prepared: PreparedImage | None = None
    extent: Extent | None = None
    """From joining a batch until announced."""
    lease: Lease | None = None
    """From announced on."""
    checksum: int = 0
    closed: bool = False

    # timeline
    queue_ms: float = 0.0
    preprocess_ms: float = 0.0
    run_ms: float = 0.0

    @property
    def timing(self) -> StageTiming:
        return StageTiming(
            queue_ms=self.queue_ms, run_ms=self.run_ms, preprocess_ms=self.preprocess_ms
        )
