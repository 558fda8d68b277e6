"""Reading announced KV blocks straight into the pool."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence

from epd.handoff import kv_contract
from epd.kv.pool import KvPool
from epd.models.spec import ModelSpec
from epd.runtime.memory import OwnedMemory
from epd.transfer.checksum import verify_at
from epd.transfer.contract import Handle
from epd.transfer.engine import ReadStats
from epd.transfer.pieces import Piece


class KvReader:
    """Fills blocks of `pool` from other workers' pools."""

    def __init__(self, spec: ModelSpec, pool: KvPool, memory: OwnedMemory) -> None:
        self._spec = spec
        self._pool = pool
        self._memory = memory

    def check(self, handle: Handle, nonce: int) -> None:
        """Raises EpdError: CONTRACT_MISMATCH, naming the field."""
        handle.check(kv_contract(self._spec, self._pool.layout, nonce))

    async def read(self, key: Hashable, blocks: Sequence[int], handle: Handle) -> ReadStats:
        """Copy the handle's blocks, in order, into `blocks`, and verify each.

        The blocks must not be reused before the engine says that no read of `key`
        is under way.

        Raises:
            EpdError: TRANSFER_FAILED, CHECKSUM_MISMATCH, CONTRACT_MISMATCH.
        """
        pieces = [
            Piece(self._pool.address(block), span.address, span.length)
            for block, span in zip(blocks, handle.spans, strict=True)
        ]
        stats = await self._memory.engine.read(
            handle.owner,
            self._spec.fingerprint,
            pieces,
            self._pool,
            handle.read_deadline_ms / 1000,
            kind="kv",
            key=key,
        )
        await asyncio.to_thread(_verify, pieces, handle)
        return stats


def _verify(pieces: Sequence[Piece], handle: Handle) -> None:
    for number, (piece, span) in enumerate(zip(pieces, handle.spans, strict=True)):
        verify_at(piece.local, piece.length, span.checksum, f"KV block {number} of the handle")
