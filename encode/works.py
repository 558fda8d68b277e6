"""Encodes under way: from a file's bytes to rows in the arena, for whoever waits.

    begin -> Batcher -> decode and resize (sandbox) -> Batcher -> forward (engine thread),
    rows copied into the arena and summed -> result

A picture that cannot be decoded, or whose forward raises, fails its own work only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from encode.batcher import Batcher, Limits
from encode.cache import EmbeddingCache
from encode.images import ImagePreparer
from encode.work import Work
from epd.config import Config, EncodeConfig
from epd.errors import EpdError, crowded
from epd.jobs import EncodeJob, Stage
from epd.models.encoder import VisionEncoder
from epd.obs import metrics
from epd.rpc.status import internal
from epd.runtime.isolate import run_isolated
from epd.runtime.steps import EngineThread, StepLoop
from epd.runtime.streams import Stopwatch
from epd.transfer.arena import Arena, Extent
from epd.transfer.checksum import checksum

logger = logging.getLogger(__name__)
_DECODED_AHEAD = 32
_MEMORY = 0.8
"""How much of what earlier batches cost still counts after one more."""
Ended = Callable[[Work, int | EpdError], None]


class Works:
    """`ended(work, sum or reason)` is called once for each work that wasn't abandoned
    before it ran; the rows are in `work.extent` then, which is the callee's."""

    def __init__(
        self,
        config: Config,
        encoder: VisionEncoder,
        pictures: ImagePreparer,
        arena: Arena,
        cache: EmbeddingCache[Extent],
        ended: Ended,
        thread: EngineThread | None = None,
    ) -> None:
        self._encoder = encoder
        self._spec = encoder.spec
        self._images = pictures
        self._arena = arena
        self._cache = cache
        self._ended = ended
        self.batcher = Batcher(_limits(config.encode))
        self._works: dict[int, Work] = {}
        self._next = 0
        self._cost_us = self._cost_rows = 0.0
        self.steps = StepLoop(Stage.ENCODE, self._step, self._runnable, thread)
        encoder.report_layers(self.steps.advance)

    def __len__(self) -> int:
        return len(self._works)

    def __getitem__(self, number: int) -> Work:
        return self._works[number]

    @property
    def queued_rows(self) -> int:
        """Of all that wait or run."""
        return sum(work.job.item.rows for work in self._works.values())

    @property
    def us_per_row(self) -> float:
        """What a row cost lately, in engine time; 0: nothing was encoded yet."""
        return self._cost_us / self._cost_rows if self._cost_rows else 0.0

    def begin(self, key: bytes, job: EncodeJob, nbytes: int) -> Work:
        """Queue a picture whose rows take `nbytes`.

        Raises:
            EpdError: OVERLOADED, the queue is full.
        """
        for crowded_out in self.batcher.make_room(job.salt, len(job.image)):
            self._drop(self._works[crowded_out], crowded())
        number, self._next = self._next, self._next + 1
        self.batcher.admit(
            number,
            client=job.salt,
            request=job.request_id,
            rows=job.item.rows,
            file_bytes=len(job.image),
        )
        work = self._works[number] = Work(number, key, job, nbytes)
        self._prepare_next()
        return work

    def abandon(self, work: Work) -> bool:
        """Nobody waits any more. False if it runs: then its result comes all the same."""
        if self.batcher.abort(work.number):
            return False
        assert work.extent is None, "only a running work has a place"
        if work.task is not None:
            work.task.cancel()
        self._end(work)
        self._prepare_next()
        self.steps.poke()
        return True

    def _end(self, work: Work) -> None:
        del self._works[work.number]
        work.prepared = work.task = None  # cancelled, it keeps what knows this work

    def _fail(self, work: Work, error: EpdError) -> None:
        self._drop(work, error)
        self._prepare_next()

    def _drop(self, work: Work, error: EpdError) -> None:
        self.batcher.abort(work.number)
        self._end(work)
        self._ended(work, error)

    def _prepare_next(self) -> None:
        """Whenever a picture came, was decoded, or left."""
        for number in self.batcher.next_pictures():
            work = self._works[number]
            name = f"prepare {work.job.request_id}"
            work.task = asyncio.create_task(self._prepare(work), name=name)

    async def _prepare(self, work: Work) -> None:
        """Decode one picture, in its turn."""
        work.queue_ms = work.since.ms
        watch = Stopwatch()
        try:
            prepared = work.prepared = await self._images.prepare(work.job)
        except EpdError as error:
            return self._fail(work, error)
        except Exception:
            logger.exception("a picture can't be prepared")
            return self._fail(work, internal(work.name))
        work.preprocess_ms = watch.ms
        work.job = replace(work.job, image=b"")
        self.batcher.decoded(work.number, prepared.patches)
        self._prepare_next()
        self.steps.poke()

    # -- batches ------------------------------------------------------------

    def _runnable(self) -> bool:
        """Whether a batch could start: a full arena is the readers' business, not a stall."""
        number = self.batcher.first
        if number is None:
            return False
        return self._cache.idle > 0 or self._arena.largest_free >= self._works[number].nbytes

    def _reserve(self, number: int) -> bool:
        """Kept embeddings give way, one by one, until it fits."""
        work = self._works[number]
        while self._arena.largest_free < work.nbytes:
            if not self._cache.evict():
                return False  # wait for a lease to end
        work.extent = self._arena.allocate(work.nbytes)
        return True

    async def _step(self) -> bool:
        numbers = self.batcher.next_batch(self._reserve)
        if not numbers:
            return False
        batch = [self._works[number] for number in numbers]
        watch = Stopwatch()
        for work in batch:
            work.queue_ms = work.since.ms - work.preprocess_ms
        results = await self.steps.run(lambda: self._forward(batch), len(batch))
        self.batcher.complete(numbers)
        self._cost_us = _MEMORY * self._cost_us + 1000 * self.steps.last_ms
        self._cost_rows = _MEMORY * self._cost_rows + sum(w.job.item.rows for w in batch)
        for work, result in zip(batch, results, strict=True):
            work.run_ms = watch.ms
            if not isinstance(result, EpdError):
                metrics.IMAGES.labels(Stage.ENCODE).inc()
            self._end(work)
            self._ended(work, result)
        self._prepare_next()
        return True

    def _forward(self, batch: Sequence[Work]) -> list[int | EpdError]:
        """In the engine thread: a sum for each image, or why there is none."""
        return run_isolated(self._encode, batch, lambda work: work.name, Stage.ENCODE)

    def _encode(self, batch: Sequence[Work]) -> list[int]:
        images = [work.prepared for work in batch if work.prepared is not None]
        assert len(images) == len(batch)
        sums = []
        for work, rows in zip(batch, self._encoder.encode(images), strict=True):
            assert work.extent is not None
            place = self._arena.view(work.extent)
            shape = (self._spec.planes, work.job.item.rows, self._spec.hidden)
            assert tuple(rows.shape) == shape
            place.view(rows.dtype).view(rows.shape).copy_(rows)
            sums.append(checksum(place))
        return sums

    def check_integrity(self) -> None:
        self.batcher.check_integrity()
        waiting = self.batcher.waiting + self.batcher.running
        assert waiting == len(self._works), "a work was lost, or not forgotten"

    async def close(self) -> None:
        await self.steps.close()
        self._images.close()


def _limits(config: EncodeConfig) -> Limits:
    """Each process of the sandbox finds its next picture waiting; else the queue holds
    compressed files, not pixels."""
    decoding = 2 * config.decode_workers
    return Limits(
        config.batch_patches,
        config.max_queue,
        decoding,
        _DECODED_AHEAD + decoding,
        config.max_queue_mib << 20,
    )
