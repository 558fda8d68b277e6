"""Reading announced KV blocks straight into the pool."""

from __future__ import annotations

from collections.abc import Sequence

from decode.ticket import Ticket
from epd.errors import invalid
from epd.handoff import kv_contract
from epd.kv.pool import KvPool
from epd.models.spec import ModelSpec
from epd.runtime.memory import OwnedMemory
from epd.runtime.streams import Stopwatch
from epd.transfer.contract import Handle, mismatch
from epd.transfer.pieces import Piece


class KvReader:
    """Fills blocks of `pool` from other workers' pools."""

    def __init__(self, spec: ModelSpec, pool: KvPool, memory: OwnedMemory) -> None:
        self._spec = spec
        self._pool = pool
        self._layout = pool.layout
        self._memory = memory

    def announced(self, ticket: Ticket, first_block: int, handle: Handle, tokens: int) -> None:
        """Check an announcement and queue it for `load`.

        Raises:
            EpdError: CONTRACT_MISMATCH, naming the field; INVALID_REQUEST, not the
                next blocks.
        """
        if first_block != ticket.announced_blocks:
            raise invalid(
                f"is {first_block}, must be {ticket.announced_blocks}", "kv_ready.first_block"
            )
        handle.check(kv_contract(self._spec, self._layout, ticket.job.nonce))
        blocks = first_block + len(handle.spans)
        expected = min(blocks * self._layout.block_tokens, ticket.total)
        if blocks > self._layout.blocks_for(ticket.total) or tokens != expected:
            raise mismatch("tokens of the announced blocks", tokens, expected)
        ticket.announced_blocks, ticket.announced_tokens = blocks, tokens
        ticket.pending.append(handle)
        ticket.arrived.set()

    async def load(self, ticket: Ticket, blocks: Sequence[int]) -> None:
        """Read what is announced, as it is announced, until the whole request is in
        `blocks`, its table. They must not be reused before the engine says that no
        read of `ticket.read_key` is under way.

        Raises:
            EpdError: TRANSFER_FAILED, CHECKSUM_MISMATCH, CONTRACT_MISMATCH.
        """
        while ticket.loaded_blocks < self._layout.blocks_for(ticket.total):
            await ticket.arrived.wait()
            ticket.arrived.clear()
            while ticket.pending:
                handle = ticket.pending.popleft()
                stop = ticket.loaded_blocks + len(handle.spans)
                await self._read(ticket, blocks[ticket.loaded_blocks : stop], handle)
                ticket.loaded_blocks = stop

    async def _read(self, ticket: Ticket, blocks: Sequence[int], handle: Handle) -> None:
        """Copy the handle's blocks, in order, into `blocks`, and verify each."""
        watch = Stopwatch()
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
            key=ticket.read_key,
        )
        read = [(p.local, span) for p, span in zip(pieces, handle.spans, strict=True)]
        await self._memory.verify("kv", read, "KV blocks")
        ticket.transfer_ms += watch.ms
        ticket.transfer_bytes += stats.nbytes
