"""Pulling bytes out of other workers' memory with the Mooncake transfer engine.

One read, from top to bottom:

    read() -- connect (sessions.py): probe, identity page, back-off
           -- merge neighbouring pieces (pieces.py)
           -- flow.py: wait for a slot in the peer's window
           -- submitter.py: one descriptor an id, on the one submitting thread
           -- _poll: every id to its end, from the event loop
           -- done, or failed / timed out / cancelled: then *parked*, its owner
              pinned, until Mooncake has let go of every id

Reads only: nothing in this package ever writes into a peer's memory (promise 1).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from epd.config import TransferConfig
from epd.errors import EpdError, ErrorKind, invalid
from epd.transfer import faults, metrics
from epd.transfer.contract import Peer
from epd.transfer.flow import Flow, Read
from epd.transfer.handshake import describe
from epd.transfer.identity import IDENTITY_BYTES, Identity
from epd.transfer.pages import OwnPages
from epd.transfer.pieces import Piece, merge
from epd.transfer.sessions import Sessions
from epd.transfer.settings import load_mooncake
from epd.transfer.submitter import Native, Result, Submitter

log = logging.getLogger("epd.transfer")

STUCK_S = 5.0
"""No progress for this long, beyond Mooncake's own timeouts, is a stuck engine."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _SPINS = 0.0002, 0.002, 8
_ABANDONED: list[object] = []
"""What a stuck engine still uses when it is closed: never freed, on purpose."""


@dataclass(frozen=True, slots=True)
class ReadStats:
    """What one successful read moved."""

    nbytes: int
    seconds: float
    descriptors: int


class Engine:
    """The transfer engine of one worker process. Belongs to one event loop."""

    def __init__(
        self,
        config: TransferConfig,
        fingerprint: str,
        epoch: int,
        *,
        load: Callable[[TransferConfig], Callable[[], Native]] = load_mooncake,
    ) -> None:
        self._config = config
        self._load = load
        self._pages = OwnPages(Identity.of(epoch, fingerprint))
        self._epoch = epoch
        self._flow = Flow()
        self._sessions = Sessions(config, self._read_page)
        self._regions: dict[int, object] = {}
        self._waiters: dict[Read, asyncio.Future[None]] = {}
        self._on_settled: list[tuple[Hashable, Callable[[], None]]] = []
        self._submitted_at: dict[int, float] = {}
        self._keys = itertools.count()
        self._native: Native | None = None
        self._submitter: Submitter | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._poller: asyncio.Task[None] | None = None
        self._session = ""
        self.transport = ""
        """What Mooncake really uses, as it says itself; empty before `start`."""
        self._faults = faults.from_environment()

    # -- life ---------------------------------------------------------------

    def start(self) -> None:
        """Load Mooncake, open its ports, register the identity page.

        Raises:
            EpdError: INVALID_REQUEST, Mooncake or a library is missing, no port is
                free, or another transport than `config.protocol` is in use.
        """
        native = self._load(self._config)()
        if native.initialize(self._config.host, "P2PHANDSHAKE", self._config.protocol, ""):
            raise invalid(
                f"the transfer engine can't start on {self._config.host}, ports "
                f"{self._config.port_min or 15000}-{self._config.port_max or 17000}: "
                "is a port free (an engine takes two)?",
                "transfer",
            )
        self._native = native
        self._session = f"{self._config.host}:{native.get_rpc_port()}"
        self.transport = self._detect_transport()
        if self.transport != self._config.protocol:
            raise invalid(
                f"Mooncake uses {self.transport}, the configuration says "
                f"{self._config.protocol}: is there an RDMA device in this container?",
                "transfer.protocol",
            )
        self.register(self._pages.address, self._pages.nbytes, self._pages)
        self._submitter = Submitter(native, self._deliver)

    async def close(self, bound_s: float = 6.0) -> bool:
        """Stop reading, wait for what is under way, then let go of all memory.

        Returns false if reads were still under way after `bound_s`: then the engine
        and the memory it uses are kept until the process ends.
        """
        for read in self._flow.all():
            self._flow.stop(read, "the engine is closing")
            self._wake(read)
        clean = await self._until(lambda: not self._flow.unsettled, bound_s)
        if self._poller:
            self._poller.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._poller
        if self._submitter:
            clean &= await asyncio.to_thread(self._submitter.stop, 1.0)
        native, self._native, self._submitter = self._native, None, None
        if clean and native is not None:
            for address in self._regions:
                native.unregister_memory(address)
            await asyncio.to_thread(_destroy, [native])
            self._regions.clear()
        elif native is not None:
            log.warning("transfer engine closed with %d reads under way", self._flow.unsettled)
            _ABANDONED.append((native, self._regions, self._flow))
        return clean

    @property
    def peer(self) -> Peer:
        """How others reach this worker's memory."""
        assert self._native is not None, "engine not started"
        return Peer(self._session, self._epoch, self._pages.address)

    def register(self, address: int, nbytes: int, owner: object) -> None:
        """Let peers read `nbytes` at `address`; `owner` is kept alive until close.

        Few and large, at start: the cost grows with the square of their number.

        Raises:
            EpdError: INTERNAL, Mooncake refused the region.
        """
        assert self._native is not None, "engine not started"
        if code := self._native.register_memory(address, nbytes):
            raise EpdError(
                ErrorKind.INTERNAL, f"Mooncake can't register {nbytes} bytes (error {code})"
            )
        self._regions[address] = owner

    # -- reading ------------------------------------------------------------

    async def read(
        self,
        peer: Peer,
        fingerprint: str,
        pieces: Sequence[Piece],
        owner: object,
        deadline_s: float,
        *,
        kind: str = "kv",
        key: Hashable = None,
    ) -> ReadStats:
        """Copy `pieces` from the peer's memory into ours.

        On success every byte is here. Otherwise the read may go on inside Mooncake:
        `owner` stays pinned, and memory that a reference can't pin (blocks of a
        pool) must not be reused before `when_settled(key, ...)` or `drain_reads(key)`
        says so. The whole call is bounded by `deadline_s` and the configured
        `read_deadline_s`. `kind` labels the metrics.

        Raises:
            EpdError: TRANSFER_FAILED, unreachable, failed or out of time;
                CONTRACT_MISMATCH, another life of the peer, other weights.
        """
        started = time.monotonic()
        parts = merge(pieces)
        try:
            async with asyncio.timeout(min(deadline_s, self._config.read_deadline_s)):
                await self._inject_before(peer)
                name = await self._sessions.connect(peer, fingerprint)
                await self._transfer(peer, name, parts, owner, key)
        except TimeoutError:
            seconds = time.monotonic() - started
            self._sessions.doubt(peer)
            metrics.FAILURES.labels(kind, "timeout").inc()
            raise _failed(peer, f"not done within {seconds:.1f} s") from None
        except EpdError as error:
            metrics.FAILURES.labels(kind, str(error.kind)).inc()
            raise
        except asyncio.CancelledError:
            metrics.FAILURES.labels(kind, "cancelled").inc()
            raise
        self._inject_after(parts)
        stats = ReadStats(sum(p.length for p in parts), time.monotonic() - started, len(parts))
        metrics.record(kind, stats.nbytes, stats.seconds, stats.descriptors)
        return stats

    async def drain_reads(self, key: Hashable, bound_s: float) -> bool:
        """Wait until Mooncake has let go of all memory of reads with this key.

        For ReadsTerminal: true means that it has; false that `bound_s` ran out.
        """
        return await self._until(lambda: not self._flow.of(key), bound_s)

    def when_settled(self, key: Hashable, then: Callable[[], None]) -> None:
        """Call `then` once no read with this key is under way; now if none is."""
        if self._flow.of(key):
            self._on_settled.append((key, then))
        else:
            then()

    @property
    def parked(self) -> int:
        """Reads that nobody waits for and Mooncake has not let go of."""
        return self._flow.parked

    @property
    def outstanding(self) -> int:
        """Descriptors with Mooncake."""
        return self._flow.outstanding

    @property
    def stuck_s(self) -> float:
        """How long Mooncake is overdue; 0 in health. Above STUCK_S the worker
        should say NOT_SERVING and be restarted: the lock inside is not ours."""
        busy = self._submitter.busy_s if self._submitter else 0.0
        oldest = min(self._submitted_at.values(), default=None)
        if oldest is None:
            return busy
        # A stopped peer's reads end by the progress timeout; a queue of them ends
        # within two.
        overdue = time.monotonic() - oldest - 2 * self._config.read_deadline_s
        return max(busy, overdue)

    @property
    def stuck(self) -> bool:
        return self.stuck_s > STUCK_S

    # -- inside -------------------------------------------------------------

    async def _transfer(
        self, peer: Peer, name: str, parts: list[Piece], owner: object, key: Hashable
    ) -> None:
        if not parts:
            return
        if self._submitter is None:
            raise _failed(peer, "this worker's transfer engine is closed")
        self._loop = asyncio.get_running_loop()
        read = Read(name, deque(parts), owner, key)
        waiter = self._waiters[read] = self._loop.create_future()
        self._flow.add(read)
        self._pump()
        try:
            await waiter
        finally:
            del self._waiters[read]
            if not read.settled:
                self._flow.stop(read, "given up")
                self._after_settled()
        if read.failure:
            self._sessions.doubt(peer)
            raise _failed(peer, read.failure)

    def _pump(self) -> None:
        """Submit what the windows allow; a job per session, so that one that must
        be opened holds up no other's ids."""
        assert self._submitter is not None
        taken = self._flow.take()
        for _, job in groupby(taken, key=lambda entry: entry[0].name):
            self._submitter.put(list(job))
        metrics.PARKED.set(self._flow.parked)

    def _deliver(self, results: list[Result]) -> None:
        """On the submitting thread."""
        assert self._loop is not None
        # RuntimeError: the loop is closed, nobody is left to poll these.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._on_submitted, results)

    def _on_submitted(self, results: list[Result]) -> None:
        now = time.monotonic()
        for read, batch_id in results:
            self._flow.submitted(read, batch_id)
            if batch_id is not None:
                self._submitted_at[batch_id] = now
            self._wake(read)
        if self._submitter is not None:
            self._pump()
        self._after_settled()
        if self._submitted_at and (self._poller is None or self._poller.done()):
            self._poller = asyncio.create_task(self._poll())

    async def _poll(self) -> None:
        """Follow every id to its end. Runs only while there are any."""
        idle = 0
        while self._submitted_at:
            idle = 0 if self._sweep() else idle + 1
            await asyncio.sleep(_pause(idle))

    def _sweep(self) -> bool:
        assert self._native is not None
        progress = False
        for read in self._flow.under_way():
            for batch_id in list(read.ids):
                status = self._native.transfer_check_status(batch_id)
                # 0: waiting; -2: late, but Mooncake still works on it. Only 1 and -1
                # are ends, and an id is gone after its end: never ask again.
                if status not in (1, -1):
                    continue
                progress = True
                del self._submitted_at[batch_id]
                self._flow.finished(read, batch_id, ok=status == 1)
            self._wake(read)
        if progress:
            if self._submitter is not None:
                self._pump()
            self._after_settled()
        return progress

    def _wake(self, read: Read) -> None:
        waiter = self._waiters.get(read)
        if waiter and not waiter.done() and (read.settled or read.stopped):
            waiter.set_result(None)

    def _after_settled(self) -> None:
        due = [entry for entry in self._on_settled if not self._flow.of(entry[0])]
        for entry in due:
            self._on_settled.remove(entry)
            entry[1]()
        metrics.PARKED.set(self._flow.parked)

    async def _until(self, condition: Callable[[], bool], bound_s: float) -> bool:
        end = time.monotonic() + bound_s
        while not condition():
            if time.monotonic() >= end:
                return False
            await asyncio.sleep(0.005)
        return True

    async def _read_page(self, name: str, peer: Peer) -> bytes:
        slot = self._pages.take_slot()
        key = ("identity", next(self._keys))
        piece = Piece(self._pages.slot_address(slot), peer.identity_address, IDENTITY_BYTES)
        try:
            await self._transfer(peer, name, [piece], self._pages, key)
            return self._pages.slot_bytes(slot)
        finally:
            self.when_settled(key, lambda: self._pages.give_slot(slot))

    def _detect_transport(self) -> str:
        with ThreadPoolExecutor(1, "epd-transfer-detect") as pool:
            try:
                return pool.submit(asyncio.run, describe(self._session, 5.0)).result().protocol
            except (OSError, ValueError) as error:
                raise invalid(
                    f"this worker's own transfer engine does not answer at {self._session}: "
                    f"{error or type(error).__name__}; is transfer.host an address of this host?",
                    "transfer.host",
                ) from error

    async def _inject_before(self, peer: Peer) -> None:
        if self._faults.fires("transfer.refuse"):
            raise _failed(peer, "refused (fault injected)")
        if delay := self._faults.value("transfer.delay"):
            await asyncio.sleep(delay)
        if self._faults.fires("transfer.drop"):
            await asyncio.sleep(self._config.read_deadline_s + 1)
        if self._faults.fires("transfer.fail"):
            raise _failed(peer, "the engine reports a failed read (fault injected)")

    def _inject_after(self, parts: list[Piece]) -> None:
        if parts and self._faults.fires("transfer.flip"):
            byte = ctypes.c_ubyte.from_address(parts[0].local)
            byte.value ^= 0xFF


def _pause(idle: int) -> float:
    """Give way a few times first (a small read takes 0.1-0.2 ms, and the loop's
    timers are no finer than 1 ms), then sleep longer and longer."""
    if idle <= _SPINS:
        return 0.0
    return float(min(_FIRST_PAUSE_S * 1.5 ** (idle - _SPINS), _LONGEST_PAUSE_S))


def _failed(peer: Peer, what: str) -> EpdError:
    return EpdError(ErrorKind.TRANSFER_FAILED, f"read from {peer.session}: {what}")


def _destroy(holder: list[Any]) -> None:
    """Drop the last reference here: the destructor joins Mooncake's threads."""
    holder.clear()
