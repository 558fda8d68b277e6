"""One encode under way, and everybody who waits for it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from blake3 import blake3

from encode.ticket import Ticket
from epd.jobs import EncodeJob
from epd.models.processor import PreparedImage
from epd.runtime.streams import Stopwatch
from epd.transfer.arena import Extent


@dataclass(slots=True, eq=False)
class Work:
    """Begun by its first waiter, ended by its result or when the last waiter leaves."""

    number: int
    """In the batcher."""
    key: bytes
    """In the cache (`content_key`)."""
    job: EncodeJob
    """The first waiter's, without the file's bytes once they are decoded."""
    nbytes: int
    """Of the rows."""
    since: Stopwatch = field(default_factory=Stopwatch)

    waiters: list[Ticket] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    """Decodes its picture."""
    prepared: PreparedImage | None = None
    extent: Extent | None = None
    """From joining a batch until its result."""

    queue_ms: float = 0.0
    preprocess_ms: float = 0.0
    run_ms: float = 0.0

    @property
    def name(self) -> str:
        """For logs: a request that waits for it. Asked in the engine thread too, while
        waiters come and go."""
        first = next(iter(self.waiters), None)
        return self.job.request_id if first is None else first.job.request_id


def content_key(job: EncodeJob) -> bytes:
    """What makes two jobs one encode: the item's digest, and what it should stand for.

    The digest alone would do, if it were ours: it covers bytes, decode rule, processor,
    weights, salt and image key. It came over a wire, so the bytes and the planned shape
    are counted too: whoever names another picture's digest gets no other picture, and
    gives nobody else a wrong one.
    """
    item = job.item
    shape = (item.rows, item.width, item.height, item.max_pixels, *item.grid)
    digest = blake3(len(item.digest).to_bytes(8, "little") + item.digest)
    digest.update(b"".join(number.to_bytes(8, "little") for number in (len(shape), *shape)))
    digest.update(job.image)
    return digest.digest()
