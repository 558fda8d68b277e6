"""Pulling bytes out of other workers' memory with the Mooncake transfer engine.

One read, from top to bottom:

    Engine.read -- sessions.py: probe, identity page, back-off
                -- pieces.py: merge neighbours into few descriptors
                -- driver.py: submit, poll, park
                   -- flow.py: fair windows;  submitter.py: the one submitting thread

Reads only: nothing in this package ever writes into a peer's memory (docs/transfer.md).
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from epd.config import TransferConfig
from epd.errors import EpdError, ErrorKind, invalid
from epd.obs.native import native_stderr
from epd.transfer import faults, metrics
from epd.transfer.contract import Peer
from epd.transfer.driver import Driver, ReadFailed
from epd.transfer.handshake import describe
from epd.transfer.identity import IDENTITY_BYTES, Identity
from epd.transfer.pages import OwnPages
from epd.transfer.pieces import Piece, merge
from epd.transfer.sessions import Sessions
from epd.transfer.settings import load_mooncake, ports
from epd.transfer.submitter import Native
from epd.transfer.wall import Wall, listening_ports

log = logging.getLogger("epd.transfer")

STUCK_S = 5.0
"""Mooncake overdue by more than this is a stuck engine (design: watchdog)."""

_COPY_BYTES = 4 << 20
"""A copy inside this process holds the event loop for no longer than this takes."""

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
        self._epoch = epoch
        self._load = load
        self._pages = OwnPages(Identity.of(epoch, fingerprint))
        self._sessions = Sessions(config, self._read_page)
        self._faults = faults.from_environment()
        self._regions: dict[int, tuple[int, object]] = {}
        """By address: length, and who owns it."""
        self._keys = itertools.count()
        self._session = ""
        self._native: Native | None = None
        self._driver: Driver | None = None
        self.transport = ""
        """What Mooncake really uses, as it says itself; empty before `start`."""

    # -- life ---------------------------------------------------------------

    def start(self) -> None:
        """Load Mooncake, open its ports, register the identity page. Blocks (ms).

        Raises:
            EpdError: INVALID_REQUEST, Mooncake or a library is missing, no port is
                free, or another transport than `config.protocol` is in use.
        """
        config = self._config
        wall = Wall.around(config.host, config.networks)
        before = listening_ports()
        self._native = self._load(config)()
        # It says "Local segment descriptor not found" as an error, each time, and means nothing.
        with native_stderr("Mooncake") as said:
            failed = self._native.initialize(config.host, "P2PHANDSHAKE", config.protocol, "")
        if failed:
            log.warning("Mooncake said: %s", "; ".join(said))
            low, high = ports(config)
            what = f"the transfer engine can't start on {config.host} with ports {low}-{high}"
            raise invalid(f"{what}: are two of them free?", "transfer")
        # Before any memory is registered: until now there is nothing to read.
        opened = listening_ports() - before
        wall.put_around(opened)
        self._session = f"{config.host}:{self._native.get_rpc_port()}"
        self.transport = _transport_of(self._session)
        if self.transport != config.protocol:
            raise invalid(
                f"Mooncake uses {self.transport}, the configuration says {config.protocol}: "
                "does this machine (this container) have an RDMA device?",
                "transfer.protocol",
            )
        wall.put_around(opened)  # whoever was in the queue before us
        self.register(self._pages.address, self._pages.nbytes, self._pages)
        # A stopped peer's reads end by the progress timeout; the second is slack.
        self._driver = Driver(self._native, late_s=config.read_deadline_s + 1)

    async def close(self, bound_s: float = 6.0) -> bool:
        """Stop reading, wait for what is under way, then let go of all memory.

        Returns false if reads were still under way after `bound_s`: then the engine
        and the memory it uses are kept until the process ends.
        """
        driver, self._driver = self._driver, None
        native, self._native = self._native, None
        if driver is None or native is None:
            return True
        if not await driver.stop(bound_s):
            log.warning("transfer engine closed with %d descriptors under way", driver.outstanding)
            _ABANDONED.append((native, driver, self._regions))
            return False
        for address in self._regions:
            native.unregister_memory(address)
        last = [native, driver]
        del native, driver
        await asyncio.to_thread(last.clear)  # the destructor joins Mooncake's threads
        self._regions.clear()
        return True

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
        self._regions[address] = (nbytes, owner)

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
        """Copy `pieces` from the peer's memory into ours. Where the peer is this process
        itself (colocated stages) that is a plain copy, without Mooncake.

        On success every byte is here. Otherwise the read may go on inside Mooncake:
        `owner` stays referenced, and memory that a reference can't pin (blocks of a
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
                local = self._native is not None and peer == self.peer
                if local:
                    await self._copy(parts)
                else:
                    name = await self._sessions.connect(peer, fingerprint)
                    await self._run(peer, name, parts, owner, key)
        except TimeoutError:
            waited = time.monotonic() - started
            self._sessions.doubt(peer, waited)
            metrics.FAILURES.labels(kind, "timeout").inc()
            raise _failed(peer, f"not done within {waited:.1f} s") from None
        except EpdError as error:
            metrics.FAILURES.labels(kind, str(error.kind)).inc()
            raise
        except asyncio.CancelledError:
            metrics.FAILURES.labels(kind, "cancelled").inc()
            raise
        if parts and self._faults.fires("transfer.flip"):
            faults.flip_byte(parts[0].local)
        stats = ReadStats(sum(p.length for p in parts), time.monotonic() - started, len(parts))
        if local:
            metrics.LOCAL_BYTES.labels(kind).inc(stats.nbytes)
        else:
            metrics.record(kind, stats.nbytes, stats.seconds, stats.descriptors)
        return stats

    async def drain_reads(self, key: Hashable, bound_s: float) -> bool:
        """Wait until Mooncake has let go of all memory of reads with this key.

        For ReadsTerminal: true means that it has; false that `bound_s` ran out.
        """
        return self._driver is None or await self._driver.drain(key, bound_s)

    def when_settled(self, key: Hashable, then: Callable[[], None]) -> None:
        """Call `then` once no read with this key is under way; now if none is.

        Not called at all if the engine is closed with that read under way: its
        memory must then never be reused.
        """
        if self._driver is None:
            then()
        else:
            self._driver.when_settled(key, then)

    @property
    def parked(self) -> int:
        """Reads that nobody waits for and Mooncake has not let go of."""
        return self._driver.parked if self._driver else 0

    @property
    def outstanding(self) -> int:
        """Descriptors with Mooncake."""
        return self._driver.outstanding if self._driver else 0

    @property
    def stuck_s(self) -> float:
        """How long Mooncake is overdue with a call or a read; 0 in health."""
        return self._driver.stuck_s if self._driver else 0.0

    @property
    def stuck(self) -> bool:
        """The worker should say NOT_SERVING and be restarted: whoever opens a
        session to a peer that stops at that moment holds Mooncake's lock for 61 s."""
        return self.stuck_s > STUCK_S

    @property
    def isolated(self) -> bool:
        """Reaches no peer at all: the worker should get no work. One bad edge of several
        is the router's business."""
        return self._sessions.isolated

    # -- inside -------------------------------------------------------------

    async def _run(
        self,
        peer: Peer,
        name: str,
        parts: list[Piece],
        owner: object,
        key: Hashable,
    ) -> None:
        if self._driver is None:
            raise _failed(peer, "this worker's transfer engine is not running")
        started = time.monotonic()
        try:
            await self._driver.run(name, parts, owner, key)
        except ReadFailed as error:
            self._sessions.doubt(peer, time.monotonic() - started)
            raise _failed(peer, str(error)) from None

    async def _copy(self, parts: Sequence[Piece]) -> None:
        """From our own registered memory; no copy is under way when this is cancelled."""
        for part in parts:
            if not any(
                start <= part.remote and part.remote + part.length <= start + nbytes
                for start, (nbytes, _) in self._regions.items()
            ):
                raise _failed(self.peer, f"{part.length} bytes at {part.remote:#x}: not registered")
            for offset in range(0, part.length, _COPY_BYTES):
                length = min(_COPY_BYTES, part.length - offset)
                ctypes.memmove(part.local + offset, part.remote + offset, length)
                await asyncio.sleep(0)

    async def _read_page(self, name: str, peer: Peer) -> bytes:
        slot = self._pages.take_slot()
        key = ("identity", next(self._keys))
        piece = Piece(self._pages.slot_address(slot), peer.identity_address, IDENTITY_BYTES)
        try:
            await self._run(peer, name, [piece], self._pages, key)
            return self._pages.slot_bytes(slot)
        finally:
            self.when_settled(key, lambda: self._pages.give_slot(slot))

    async def _inject_before(self, peer: Peer) -> None:
        """Fault points of the reader; see faults.py."""
        if self._faults.fires("transfer.refuse"):
            raise _failed(peer, "refused (fault injected)")
        if delay := self._faults.value("transfer.delay"):
            await asyncio.sleep(delay)
        if self._faults.fires("transfer.drop"):
            await asyncio.sleep(self._config.read_deadline_s + 1)
        if self._faults.fires("transfer.fail"):
            raise _failed(peer, "the engine reports a failed read (fault injected)")


def _transport_of(session: str) -> str:
    """What the engine that we have just started says that it uses."""

    def ask() -> Any:
        return asyncio.run(describe(session, timeout_s=5.0))

    # On a thread: `start` may be called from a running event loop.
    with ThreadPoolExecutor(1, "epd-transfer-detect") as pool:
        try:
            return str(pool.submit(ask).result().protocol)
        except (OSError, ValueError) as error:
            raise invalid(
                f"this worker's own transfer engine does not answer at {session} "
                f"({error or type(error).__name__}): is that an address of this machine?",
                "transfer.host",
            ) from error


def _failed(peer: Peer, what: str) -> EpdError:
    return EpdError(ErrorKind.TRANSFER_FAILED, f"read from {peer.session}: {what}")
