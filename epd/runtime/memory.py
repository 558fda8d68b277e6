"""A worker's registered memory: its transfer engine, and the leases on its bytes."""

from __future__ import annotations

import secrets
import time

from epd.config import Config
from epd.transfer import faults
from epd.transfer.contract import Peer
from epd.transfer.engine import Engine
from epd.transfer.lease import Lease, LeaseTable


class OwnedMemory:
    """Made once at start; starts the transfer engine.

    `max_quarantined` caps the bytes that lost readers may withhold.

    Raises:
        EpdError: the engine can't start (see `Engine.start`).
    """

    def __init__(self, config: Config, fingerprint: str, max_quarantined: int) -> None:
        transfer = config.transfer
        self.engine = Engine(transfer, fingerprint, secrets.randbits(64))
        self.engine.start()
        self.leases = LeaseTable(
            transfer.read_deadline_s + transfer.quarantine_margin_s, max_quarantined
        )
        self.read_deadline_ms = int(transfer.read_deadline_s * 1000)
        self.faults = faults.from_environment()

    @property
    def peer(self) -> Peer:
        return self.engine.peer

    def register(self, address: int, nbytes: int, owner: object) -> None:
        self.engine.register(address, nbytes, owner)

    def end(self, lease: Lease, *, clean: bool) -> None:
        """End a lease: its bytes are free now, or after the quarantine."""
        if clean:
            self.leases.release(lease)
        else:
            self.leases.lost(lease, time.monotonic())

    def tick(self) -> bool:
        """Free what waited out its quarantine; whether there was any."""
        return self.leases.sweep(time.monotonic()) > 0

    def healthy(self) -> bool:
        return not self.engine.stuck

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
