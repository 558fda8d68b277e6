"""KV blocks as the owner announces them: sealed, leased, and given back once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from epd.handoff import kv_contract
from epd.kv.store import KvStore
from epd.models.spec import ModelSpec
from epd.runtime.memory import OwnedMemory
from epd.transfer.contract import Handle, Span
from prefill.ticket import KvReady, Ticket


class KvLessor:
    """`freed` is called when blocks became free."""

    def __init__(
        self,
        spec: ModelSpec,
        kv: KvStore,
        memory: OwnedMemory,
        freed: Callable[[], None],
    ) -> None:
        self._spec = spec
        self._pool = kv.pool
        self._blocks = kv.blocks
        self._grants = kv.grants
        self._memory = memory
        self._freed = freed

    def announce(self, ticket: Ticket, computed: int) -> KvReady | None:
        """Put newly sealed blocks under the ticket's lease; None if there are none, or
        nobody will read them.

        `computed` is how many tokens of the request have KV.
        """
        first, stop = ticket.announced, len(ticket.sums)
        if first == stop or not ticket.job.decode_follows:
            return None
        blocks = ticket.blocks[first:stop]
        for block in blocks:
            self._lease(ticket, block)
        ticket.announced = stop
        self._grants.extend(ticket.job.nonce, ticket, blocks)
        tokens = min(stop * self._pool.layout.block_tokens, computed)
        return KvReady(first, self._handle(ticket, first, stop), tokens)

    def _lease(self, ticket: Ticket, block: int) -> None:
        """A cached block may be under many leases: its bytes are those of all."""
        leases, nbytes = self._memory.leases, self._pool.layout.block_bytes
        free, shared = partial(self._free, [block]), (id(self._pool), block)
        if ticket.lease is None:
            ticket.lease = leases.announce(ticket.job.request_id, nbytes, free, shared)
        else:
            leases.extend(ticket.lease, nbytes, free, shared)

    def _handle(self, ticket: Ticket, first: int, stop: int) -> Handle:
        blocks, sums = ticket.blocks[first:stop], ticket.sums[first:stop]
        size, faults = self._pool.layout.block_bytes, self._memory.faults
        addresses = [self._pool.address(block) for block in blocks]
        if faults.fires("lease.stale"):
            self._pool.block_bytes_view(blocks[0])[0] ^= 0xFF
        if faults.fires("lease.wrong_rows"):
            blocks = [(block + 1) % self._pool.num_blocks for block in blocks]
            addresses = [self._pool.address(block) for block in blocks]
        if faults.fires("lease.short"):
            addresses.pop()
        if faults.fires("lease.unregistered"):
            addresses[0] = self._pool.address(0) + self._pool.num_blocks * size
        return Handle(
            owner=self._memory.peer,
            contract=kv_contract(self._spec, self._pool.layout, ticket.job.nonce),
            spans=tuple(
                Span(address, size, total) for address, total in zip(addresses, sums, strict=False)
            ),
            read_deadline_ms=self._memory.read_deadline_ms,
        )

    def end(self, ticket: Ticket) -> None:
        """Give back all blocks of a ticket: what was never announced is free now,
        what was is free now after a clean end, else quarantined. No step may run on
        them. Nothing happens the second time."""
        unannounced, ticket.blocks = ticket.blocks[ticket.announced :], []
        lease, ticket.lease = ticket.lease, None
        if lease is not None:
            self._grants.end(ticket.job.nonce, ticket)
            self._memory.end(lease, clean=not ticket.lost)
        ticket.announced = 0
        self._free(unannounced)

    def _free(self, blocks: list[int]) -> None:
        self._blocks.free(blocks)
        self._freed()
