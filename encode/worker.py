"""Vision tower and outgoing memory of one encode worker: one encode, many readers.

One image's life:

    submit --its embedding is kept-----------------------> finished -> announce -> close
       |---equal bytes are being encoded: wait with them --^             (lease)
       +---else: begin (works.py) -------------------------^

Who owns what: the arena owns all bytes. A work holds an extent while its batch runs;
then the cache has it, pinned once for each ticket that waited. A ticket's pin passes to
its lease when it is announced, and ends with it: at once after a clean end, else after
the quarantine. Whoever leaves early ends nothing for the others; the last to leave ends
the work, unless it runs already: then the embedding is kept for whoever comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from encode.cache import EmbeddingCache, Entry
from encode.images import ImagePreparer
from encode.ticket import Ticket
from encode.work import Work, content_key
from encode.works import Works
from epd.config import Config
from epd.errors import EpdError, ErrorKind
from epd.handoff import embedding_bytes, embedding_contract
from epd.jobs import EncodeJob, Stage
from epd.models.encoder import VisionEncoder
from epd.obs import metrics
from epd.pages import asked_for_by
from epd.runtime.group import Description, Load
from epd.runtime.memory import OwnedMemory
from epd.runtime.pinning import pin
from epd.runtime.steps import EngineThread
from epd.runtime.worker import StageWorker
from epd.transfer.arena import Arena, Extent
from epd.transfer.contract import Handle, Span

_CACHE = "embedding"


class EncodeWorker(StageWorker[Ticket]):
    """Everything of an encode process but gRPC. Methods run on the event loop."""

    stage = Stage.ENCODE

    def __init__(
        self,
        config: Config,
        encoder: VisionEncoder,
        pictures: ImagePreparer,
        memory: OwnedMemory,
        thread: EngineThread | None = None,
    ) -> None:
        with asked_for_by("encode.arena_mib"):
            self._arena = Arena(config.encode.arena_mib << 20)
        pin(self._arena.tensor, config.model.device)
        self._cache: EmbeddingCache[Extent] = EmbeddingCache(
            config.encode.cache_mib << 20, self._free, metrics.CACHE_EVICTIONS.labels(_CACHE).inc
        )
        self._works = Works(
            config, encoder, pictures, self._arena, self._cache, self._ended, thread
        )
        super().__init__(memory, self._works.steps)
        self._config = config
        self.spec = encoder.spec
        self._weights_bytes = encoder.weights_bytes
        self._by_key: dict[bytes, Work] = {}
        self._next_key = 0
        memory.register(self._arena.address, self._arena.nbytes, self._arena)

    # -- one image ----------------------------------------------------------

    def submit(self, job: EncodeJob) -> Ticket:
        """Ask for an image's rows: kept ones, those that are being made, or new ones.

        Raises:
            EpdError: IMAGE_TOO_LARGE, its rows don't fit the whole arena;
                OVERLOADED, the queue is full, or lost readers hold the arena.
        """
        self.memory.check_quarantine()
        nbytes = embedding_bytes(self.spec, job.item.rows)
        if nbytes > self._arena.nbytes:
            raise EpdError(
                ErrorKind.IMAGE_TOO_LARGE,
                f"its {job.item.rows} rows take {nbytes} bytes, the encoder's arena "
                f"(encode.arena_mib) holds {self._arena.nbytes}",
                param="job.item.rows",
            )
        number, self._next_key = self._next_key, self._next_key + 1
        key = content_key(job) if self._cache.enabled else number.to_bytes(8)
        entry = self._cache.take(key)
        work = None if entry is not None else self._work(key, job, nbytes)
        finished = asyncio.get_running_loop().create_future()
        stripped = replace(job, image=b"")
        ticket = Ticket(number, stripped, nbytes, finished)
        self._tickets[number] = ticket
        if work is not None:
            ticket.work = work.number
            work.waiters.append(ticket)
        elif entry is not None:
            self._give(ticket, entry)
            metrics.CACHE_LOOKUPS.labels(_CACHE, "hit").inc()
        return ticket

    def _work(self, key: bytes, job: EncodeJob, nbytes: int) -> Work:
        """The work that makes `key`, begun now if nobody did."""
        work = self._by_key.get(key)
        if work is None:
            work = self._by_key[key] = self._works.begin(key, job, nbytes)
            metrics.CACHE_LOOKUPS.labels(_CACHE, "miss").inc()
        elif (waiting := self._waiting_of(job.salt)) < (most := self._config.encode.max_queue):
            metrics.CACHE_LOOKUPS.labels(_CACHE, "joined").inc()
        else:
            reason = f"{waiting} images of this client wait, {most} may (encode.max_queue)"
            raise EpdError(ErrorKind.OVERLOADED, reason, retry_after_s=1.0)
        return work

    def _waiting_of(self, client: bytes) -> int:
        """Whoever waits for what is made already takes no place in the queue, but a stream."""
        tickets = self._tickets.values()
        return sum(ticket.work is not None and ticket.job.salt == client for ticket in tickets)

    def _ended(self, work: Work, result: int | EpdError) -> None:
        """Give all waiters the rows, or the reason why there are none."""
        del self._by_key[work.key]
        waiters, extent = work.waiters, work.extent
        if isinstance(result, EpdError):
            if extent is not None:
                self._free(extent)
            for ticket in waiters:
                ticket.work = None
                ticket.finished.set_exception(result)
            return
        assert extent is not None
        nbytes = self._arena.rounded(work.nbytes)
        entry = self._cache.add(work.key, extent, nbytes, result, len(waiters))
        for ticket in waiters:
            ticket.run_ms, ticket.preprocess_ms = work.run_ms, work.preprocess_ms
            ticket.queue_ms = max(0.0, ticket.since.ms - work.run_ms - work.preprocess_ms)
            self._give(ticket, entry)

    def _give(self, ticket: Ticket, entry: Entry[Extent]) -> None:
        """The entry was pinned for this ticket."""
        ticket.work, ticket.entry = None, entry
        metrics.observe_phases(self.stage, ticket.timing)
        ticket.finished.set_result(None)

    def announce(self, ticket: Ticket) -> Handle:
        """Lease the finished rows to whoever is told the handle."""
        entry = ticket.entry
        assert entry is not None
        ticket.lease = self.memory.leases.announce(
            ticket.job.request_id, ticket.nbytes, lambda: self._unpin(entry), shared=entry
        )
        return self._handle(ticket, entry)

    def _handle(self, ticket: Ticket, entry: Entry[Extent]) -> Handle:
        arena, faults = self._arena, self.memory.faults
        rows, address = ticket.job.item.rows, arena.address_of(entry.place)
        if faults.fires("lease.stale"):
            arena.view(entry.place)[0] ^= 0xFF
        if faults.fires("lease.wrong_rows"):
            address = arena.address + (arena.nbytes - ticket.nbytes)
        if faults.fires("lease.short"):
            rows -= 1
        if faults.fires("lease.unregistered"):
            address = arena.address + arena.nbytes
        span = Span(address, embedding_bytes(self.spec, rows), entry.checksum)
        return Handle(
            owner=self.memory.peer,
            contract=embedding_contract(self.spec, rows, ticket.job.nonce),
            spans=(span,),
            read_deadline_ms=self.memory.read_deadline_ms,
        )

    def close(self, ticket: Ticket, *, clean: bool) -> None:
        """The image's stream has ended; `clean` if its reader said that it is done.

        Never announced: its pin ends at once. Announced: at once after a clean end, else
        after the quarantine, and nobody new gets these rows: a reader that found them
        damaged ends like that.
        """
        del self._tickets[ticket.key]
        if not ticket.finished.done():
            ticket.finished.cancel()
        if ticket.lease is not None:
            assert ticket.entry is not None
            if not clean:
                self._cache.retire(ticket.entry)
            self.memory.end(ticket.lease, clean=clean)
        elif ticket.entry is not None:
            self._unpin(ticket.entry)
        elif ticket.work is not None:
            self._leave(self._works[ticket.work], ticket)

    def _leave(self, work: Work, ticket: Ticket) -> None:
        work.waiters.remove(ticket)
        if not work.waiters and self._works.abandon(work):
            del self._by_key[work.key]

    def _waits(self, ticket: Ticket) -> bool:
        # Decoded is not begun: decoding again costs little, encoding again much.
        return ticket.work is not None and self._works[ticket.work].extent is None

    def _fail(self, ticket: Ticket, error: EpdError) -> None:
        assert ticket.work is not None
        self._leave(self._works[ticket.work], ticket)
        ticket.work = None
        ticket.finished.set_exception(error)

    def _unpin(self, entry: Entry[Extent]) -> None:
        self._cache.unpin(entry)
        self.steps.poke()

    def _free(self, extent: Extent) -> None:
        self._arena.free(extent)
        self.steps.poke()

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
        return Load(
            running=self._works.batcher.running,
            waiting=self._works.batcher.waiting,
            queued_rows=self._works.queued_rows,
            us_per_row=self._works.us_per_row,
        )

    def state(self) -> Mapping[str, object]:
        return {
            **self._common_state(),
            "waiting": self._works.batcher.waiting,
            "running": self._works.batcher.running,
            "queued_rows": self._works.queued_rows,
            "backlog_ms": self._works.queued_rows * self._works.us_per_row / 1e3,
            "tickets": len(self._tickets) + len(self._works),
            "arena_bytes_used": self._arena.used_bytes - self._cache.idle_bytes,
            "arena_bytes": self._arena.nbytes,
            "weights_bytes": self._weights_bytes,
            "cache_bytes": self._cache.kept_bytes,
            "cache_bytes_pinned": self._cache.pinned_bytes,
        }

    def check_integrity(self) -> None:
        """Assert the bookkeeping; call it when idle or after a test."""
        self._works.check_integrity()
        self._cache.check_integrity()
        self._arena.check_integrity()
        self.memory.leases.check_integrity()
        if not self._tickets and not self._works and not self.memory.leases.quarantined_bytes:
            assert not self._by_key, "a work is not forgotten"
            assert self._cache.pinned_bytes == 0, "a pin leaked"
            assert self._arena.used_bytes == self._cache.idle_bytes, "an extent leaked"

    async def shut_down(self) -> None:
        await self._works.close()
        await self.memory.close()
