"""A worker's registered memory: its transfer engine, and the leases on its bytes."""

from __future__ import annotations

import secrets
import time

from epd.config import Config
from epd.errors import EpdError, ErrorKind
from epd.transfer import faults, metrics
from epd.transfer.contract import Peer
from epd.transfer.engine import Engine
from epd.transfer.lease import Lease, LeaseTable

_UNLIMITED = 1 << 62


class OwnedMemory:
    """Made once at start, for all stages of the process; starts the transfer engine.

    Raises:
        EpdError: the engine can't start (see `Engine.start`).
    """

    def __init__(self, config: Config, fingerprint: str) -> None:
        transfer = config.transfer
        self.engine = Engine(transfer, fingerprint, secrets.randbits(64))
        self.engine.start()
        hold_s = transfer.read_deadline_s + transfer.quarantine_margin_s
        self.leases = LeaseTable(hold_s, _UNLIMITED)
        self._max_quarantined = 0
        self.read_deadline_ms = int(transfer.read_deadline_s * 1000)
        self.faults = faults.from_environment()

    @property
    def peer(self) -> Peer:
        return self.engine.peer

    def register(self, address: int, nbytes: int, owner: object) -> None:
        self.engine.register(address, nbytes, owner)

    def may_quarantine(self, nbytes: int) -> None:
        """Lost readers may withhold so many bytes more: above the sum of these, new work
        is refused before it costs anything (`check_quarantine`); what runs goes on."""
        self._max_quarantined += nbytes

    def check_quarantine(self) -> None:
        """Raises EpdError: OVERLOADED, too much memory waits for lost readers."""
        waiting = self.leases.quarantined_bytes
        if waiting > self._max_quarantined:
            raise EpdError(
                ErrorKind.OVERLOADED,
                f"{waiting} bytes wait for lost readers (limit {self._max_quarantined})",
                retry_after_s=self.leases.hold_s,
            )

    def end(self, lease: Lease, *, clean: bool) -> None:
        """End a lease: its bytes are free now, or after the quarantine."""
        if clean:
            self.leases.release(lease)
        else:
            self.leases.lost(lease, time.monotonic())

    def tick(self) -> bool:
        """Free what waited out its quarantine; whether there was any."""
        freed = self.leases.sweep(time.monotonic())
        metrics.QUARANTINED.set(self.leases.quarantined_bytes)
        return freed > 0

    def healthy(self) -> bool:
        return not self.engine.stuck

    def reaches_peers(self) -> bool:
        """False while no peer at all answers."""
        return not self.engine.isolated

    def state(self) -> dict[str, object]:
        return {
            "leases_open": self.leases.open_count,
            "leased_bytes": self.leases.open_bytes,
            "quarantined_bytes": self.leases.quarantined_bytes,
            "reads_parked": self.engine.parked,
            "reads_outstanding": self.engine.outstanding,
        }

    async def close(self) -> None:
        await self.engine.close()
