"""Vision tower and outgoing memory of one encode worker.

One image's life:

    submit -> decode and resize (sandbox) -> Batcher -> forward (engine thread),
    rows copied into the arena and summed -> announce (lease) -> close

Who owns what: the arena owns all bytes; a ticket holds an extent from joining a
batch until it is announced, and its lease from then on. A ticket closed while its
batch runs keeps the extent until the batch is done.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from encode.batcher import Batcher
from encode.images import ImagePreparer
from encode.ticket import Ticket
from epd.config import Config
from epd.errors import EpdError, ErrorKind
from epd.handoff import embedding_bytes, embedding_contract
from epd.jobs import EncodeJob, Stage
from epd.models.encoder import VisionEncoder
from epd.obs import metrics
from epd.rpc.status import internal
from epd.runtime.isolate import run_isolated
from epd.runtime.memory import OwnedMemory
from epd.runtime.stage import Description, Load
from epd.runtime.steps import StepLoop
from epd.runtime.streams import Stopwatch, Streams
from epd.transfer.arena import Arena, Extent
from epd.transfer.checksum import checksum
from epd.transfer.contract import Handle, Span

logger = logging.getLogger(__name__)


class EncodeWorker:
    """Everything of an encode process but gRPC. Methods run on the event loop."""

    stage = Stage.ENCODE

    def __init__(
        self, config: Config, encoder: VisionEncoder, pictures: ImagePreparer, memory: OwnedMemory
    ) -> None:
        self._config = config
        self._encoder = encoder
        self.spec = encoder.spec
        self.memory = memory
        self._images = pictures
        self._batcher = Batcher(config.encode.batch_patches, config.encode.max_queue)
        self._arena = Arena(config.encode.arena_mib << 20)
        self._tickets: dict[int, Ticket] = {}
        self._next_key = 0
        self.streams = Streams(self.stage)
        self.steps = StepLoop(self.stage, self._step, self._runnable)
        memory.register(self._arena.address, self._arena.nbytes, self._arena)

    # -- one image ----------------------------------------------------------

    def submit(self, job: EncodeJob) -> Ticket:
        """Queue an image.

        Raises:
            EpdError: IMAGE_TOO_LARGE, its rows don't fit the whole arena;
                OVERLOADED, the queue is full, or lost readers hold the arena.
        """
        self.memory.check_quarantine()
        self._check_queue(len(job.image))
        nbytes = embedding_bytes(self.spec, job.item.rows)
        if nbytes > self._arena.nbytes:
            raise EpdError(
                ErrorKind.IMAGE_TOO_LARGE,
                f"its {job.item.rows} rows take {nbytes} bytes, the encoder's arena "
                f"(encode.arena_mib) holds {self._arena.nbytes}",
                param="job.item.rows",
            )
        key, self._next_key = self._next_key, self._next_key + 1
        depth = self._batcher.admit(key)
        finished = asyncio.get_running_loop().create_future()
        ticket = Ticket(key, job, nbytes, len(job.image), depth, finished)
        self._tickets[key] = ticket
        ticket.task = asyncio.create_task(self._prepare(ticket), name=f"prepare {job.request_id}")
        return ticket

    def _check_queue(self, more: int) -> None:
        """The queue is bounded in bytes too: it holds compressed files."""
        limit = self._config.encode.max_queue_mib << 20
        held = sum(ticket.file_bytes for ticket in self._tickets.values())
        if held and held + more > limit:
            raise EpdError(
                ErrorKind.OVERLOADED,
                f"{held} bytes of images wait already (encode.max_queue_mib)",
                retry_after_s=1.0,
            )

    def announce(self, ticket: Ticket) -> Handle:
        """Lease the finished rows to whoever is told the handle."""
        extent = ticket.extent
        assert extent is not None
        ticket.lease = self.memory.leases.announce(
            ticket.job.request_id, ticket.nbytes, lambda: self._free(extent)
        )
        ticket.extent = None  # the lease frees it now
        address = self._arena.address_of(extent)
        if self.memory.faults.fires("lease.stale"):
            self._arena.view(extent)[0] ^= 0xFF
        if self.memory.faults.fires("lease.wrong_rows"):
            address = self._arena.address + (self._arena.nbytes - ticket.nbytes)
        return Handle(
            owner=self.memory.peer,
            contract=embedding_contract(self.spec, ticket.job.item.rows, ticket.job.nonce),
            spans=(Span(address, ticket.nbytes, ticket.checksum),),
            read_deadline_ms=self.memory.read_deadline_ms,
        )

    def close(self, ticket: Ticket, *, clean: bool) -> None:
        """The image's stream has ended; `clean` if its reader said that it is done.

        Never announced: free at once. Announced: free at once after a clean end,
        else quarantined. Running: its extent is freed when the batch is done.
        """
        ticket.closed = True
        if ticket.task is not None:
            ticket.task.cancel()
        if not ticket.finished.done():
            ticket.finished.cancel()
        running = self._batcher.abort(ticket.key)
        if ticket.lease is not None:
            self.memory.end(ticket.lease, clean=clean)
        elif not running:
            self._drop(ticket)
        if not running:
            del self._tickets[ticket.key]
        self.steps.poke()

    def _drop(self, ticket: Ticket) -> None:
        if ticket.extent is not None:
            self._free(ticket.extent)
            ticket.extent = None

    def _free(self, extent: Extent) -> None:
        self._arena.free(extent)
        self.steps.poke()

    async def _prepare(self, ticket: Ticket) -> None:
        """Decode one picture in its turn; a bad one fails only its own ticket."""
        await self._images.place.acquire()
        try:
            ticket.queue_ms = ticket.since.ms
            watch = Stopwatch()
            ticket.prepared = await self._images.prepare(ticket.job)
            ticket.preprocess_ms = watch.ms
            ticket.job, ticket.file_bytes = replace(ticket.job, image=b""), 0
        except EpdError as error:
            self._fail(ticket, error)
        except Exception:
            logger.exception("a picture can't be prepared")
            self._fail(ticket, internal(ticket.job.request_id))
        finally:
            if ticket.prepared is None:
                self._images.place.release()
        if ticket.prepared is not None:
            await self._hold_place(ticket)

    async def _hold_place(self, ticket: Ticket) -> None:
        """Keep the place of a decoded picture until its batch is done or it is closed."""
        assert ticket.prepared is not None
        self._batcher.prepared(ticket.key, ticket.prepared.patches)
        self.steps.poke()
        try:
            await asyncio.wait([ticket.finished])
        finally:
            self._images.place.release()

    def _fail(self, ticket: Ticket, error: EpdError) -> None:
        if not ticket.finished.done():
            ticket.finished.set_exception(error)

    # -- batches ------------------------------------------------------------

    def _runnable(self) -> bool:
        """Whether a batch could start: a full arena is the readers' business, not a stall."""
        key = self._batcher.first
        return key is not None and self._arena.largest_free >= self._tickets[key].nbytes

    def _reserve(self, key: int) -> bool:
        ticket = self._tickets[key]
        try:
            ticket.extent = self._arena.allocate(ticket.nbytes)
        except EpdError:  # full: wait for a lease to end
            return False
        return True

    async def _step(self) -> bool:
        keys = self._batcher.next_batch(self._reserve)
        if not keys:
            return False
        batch = [self._tickets[key] for key in keys]
        watch = Stopwatch()
        for ticket in batch:
            ticket.queue_ms = ticket.since.ms - ticket.preprocess_ms
        results = await self.steps.run(lambda: self._forward(batch), len(batch))
        self._batcher.complete(keys)
        for ticket, result in zip(batch, results, strict=True):
            ticket.run_ms = watch.ms
            self._settle(ticket, result)
        return True

    def _settle(self, ticket: Ticket, result: int | EpdError) -> None:
        """Apply one image's result: a sum, or why there is none."""
        if ticket.closed:
            self._drop(ticket)
            del self._tickets[ticket.key]
        elif isinstance(result, EpdError):
            self._drop(ticket)
            self._fail(ticket, result)
        else:
            ticket.checksum = result
            metrics.IMAGES.labels(self.stage).inc()
            metrics.observe_phases(self.stage, ticket.timing)
            ticket.finished.set_result(None)
        ticket.prepared = None

    def _forward(self, batch: Sequence[Ticket]) -> list[int | EpdError]:
        """In the engine thread: a sum for each image, or why there is none."""
        return run_isolated(self._encode, batch, lambda ticket: ticket.job.request_id)

    def _encode(self, batch: Sequence[Ticket]) -> list[int]:
        images = [ticket.prepared for ticket in batch if ticket.prepared is not None]
        assert len(images) == len(batch)
        sums = []
        for ticket, rows in zip(batch, self._encoder.encode(images), strict=True):
            assert ticket.extent is not None
            place = self._arena.view(ticket.extent)
            assert tuple(rows.shape) == (self.spec.planes, ticket.job.item.rows, self.spec.hidden)
            place.view(rows.dtype).view(rows.shape).copy_(rows)
            sums.append(checksum(place))
        return sums

    # -- the whole worker ---------------------------------------------------

    def describe(self) -> Description:
        row_bytes = embedding_bytes(self.spec, 1)
        return Description(
            epoch=self.memory.peer.epoch,
            fingerprint=self.spec.fingerprint,
            dtype=self.spec.dtype,
            numerics_id="",
            max_rows=self._arena.nbytes // row_bytes,
            max_queue=self._config.encode.max_queue,
        )

    def load(self) -> Load:
        return Load(running=self._batcher.running, waiting=self._batcher.waiting)

    def state(self) -> Mapping[str, object]:
        return {
            "streams": len(self.streams),
            "waiting": self._batcher.waiting,
            "running": self._batcher.running,
            "tickets": len(self._tickets),
            "arena_bytes_used": self._arena.used_bytes,
            "arena_bytes": self._arena.nbytes,
            "steps": self.steps.steps,
            "tasks": len(asyncio.all_tasks()),
            **self.memory.state(),
        }

    def healthy(self) -> bool:
        return self.memory.healthy()

    def tick(self) -> None:
        if self.memory.tick():
            self.steps.poke()

    def check_integrity(self) -> None:
        """Assert the bookkeeping; call it when idle or after a test."""
        self._batcher.check_integrity()
        self._arena.check_integrity()
        self.memory.leases.check_integrity()
        if not self._tickets and not self.memory.leases.quarantined_bytes:
            assert self._arena.used_bytes == 0, "an extent leaked"

    def start(self) -> asyncio.Task[None]:
        return self.steps.start()

    async def shut_down(self) -> None:
        await self.steps.close()
        self._images.close()
        await self.memory.close()
