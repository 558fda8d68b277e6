"""Reading announced KV blocks straight into the pool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping, Sequence

from decode.ticket import Ticket
from epd.errors import EpdError, ErrorKind, invalid
from epd.handoff import kv_contract
from epd.kv.store import KvStore
from epd.models.spec import ModelSpec
from epd.obs import metrics
from epd.runtime.memory import OwnedMemory
from epd.runtime.streams import Stopwatch
from epd.transfer.contract import Handle, Span, mismatch
from epd.transfer.verified import read_verified

Share = Callable[[Sequence[int]], None]
Replace = Callable[[int, int], None]
"""Told a place of the table, and the block to use there."""


class KvReader:
    """Fills blocks of `kv` from other workers' pools; what it read and verified is cached."""

    def __init__(
        self, spec: ModelSpec, kv: KvStore, memory: OwnedMemory, shared: bool = False
    ) -> None:
        """`shared`: a prefill of this process announces blocks of the same store."""
        self._spec = spec
        self._kv = kv
        self._shared = shared
        self._pool = kv.pool
        self._prefix = kv.prefix
        self._layout = kv.layout
        self._memory = memory
        self._reading: dict[bytes, asyncio.Event] = {}
        """Full blocks that are being read, by hash; set when that is over."""
        self._copying: dict[Hashable, asyncio.Task[None]] = {}
        """To the device, by `read_key`: a thread can't be cancelled."""

    @property
    def copying(self) -> int:
        """Copies to the device under way, whoever still waits for them."""
        return len(self._copying)

    def when_settled(self, key: Hashable, then: Callable[[], None]) -> None:
        """Call `then` once no read with this key, and no copy of what it read to the device,
        writes into blocks any more; now if none does. Nothing more may be begun for it."""
        copying = self._copying.get(key)
        if copying is None:
            self._memory.engine.when_settled(key, then)
        else:
            copying.add_done_callback(lambda _: self.when_settled(key, then))

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
        if not first_block:
            ticket.adopts = self._shared and handle.owner == self._memory.peer
        ticket.announced_blocks, ticket.announced_tokens = blocks, tokens
        ticket.pending.append(handle)
        ticket.arrived.set()

    async def load(
        self, ticket: Ticket, blocks: Sequence[int], cached: int, replace: Replace
    ) -> None:
        """Read what is announced, as it is announced, until the whole request is in
        `blocks`, its table; the first `cached` are there already. They must not be
        reused before `when_settled(ticket.read_key, ...)` says so.
        What another request is reading at the same time is not read again: `replace` is
        told of its block.

        Raises:
            EpdError: TRANSFER_FAILED, CHECKSUM_MISMATCH, CONTRACT_MISMATCH.
        """
        table = list(blocks)
        ticket.loaded_blocks = cached
        announced = 0
        while ticket.loaded_blocks < self._layout.blocks_for(ticket.total):
            await ticket.arrived.wait()
            ticket.arrived.clear()
            while ticket.pending:
                handle = ticket.pending.popleft()
                first, announced = announced, announced + len(handle.spans)
                lacking = range(max(first, ticket.loaded_blocks), announced)
                if lacking:
                    await self._bring(ticket, table, lacking, handle, first, replace)
                    ticket.loaded_blocks = announced

    async def _bring(
        self,
        ticket: Ticket,
        table: list[int],
        places: Sequence[int],
        handle: Handle,
        first: int,
        replace: Replace,
    ) -> None:
        """Fill places of the table: read the blocks, or wait for who reads the same ones.
        If that comes to nothing, read them after all; `first` is the handle's place."""
        names = dict(enumerate(ticket.chain.hashes)) if self._prefix.enabled else {}
        while places:
            ours = [i for i in places if not self._comes(names.get(i))]
            await self._read_ours(ticket, table, ours, handle, first, names)
            theirs, places = [i for i in places if i not in ours], []
            for place in theirs:
                block = await self._joined(names[place])
                if block is None:
                    places.append(place)
                else:
                    replace(place, block)
                    table[place] = block

    def _comes(self, name: bytes | None) -> bool:
        """Whether a block is being read for somebody else, or is here already."""
        return name is not None and (name in self._reading or self._prefix.has(name))

    async def _joined(self, name: bytes) -> int | None:
        if name in self._reading:
            await self._reading[name].wait()
        return self._prefix.join(name)

    async def _read_ours(
        self,
        ticket: Ticket,
        table: Sequence[int],
        places: Sequence[int],
        handle: Handle,
        first: int,
        names: Mapping[int, bytes],
    ) -> None:
        """Only full blocks have a name, and are kept: the last one will be written to."""
        if not places:
            return
        named = [i for i in places if i in names]
        over = asyncio.Event()
        self._reading.update((names[i], over) for i in named)
        try:
            spans = [handle.spans[i - first] for i in places]
            await self._read(ticket, [table[i] for i in places], handle, spans)
            self._prefix.insert([names[i] for i in named], [table[i] for i in named])
        finally:
            for i in named:
                del self._reading[names[i]]
            over.set()

    async def adopt(self, ticket: Ticket, own: Sequence[int], share: Share) -> None:
        """Take over what is announced, as it is announced, where prefill is in this
        process: `share` is given full blocks, and the last, partial one is copied into
        `own[0]`, since decode goes on writing in it. No other byte is moved.

        Raises:
            EpdError: TRANSFER_FAILED, prefill's lease is over.
        """
        whole = ticket.total // self._layout.block_tokens
        while ticket.loaded_blocks < self._layout.blocks_for(ticket.total):
            await ticket.arrived.wait()
            ticket.arrived.clear()
            while ticket.pending:
                handle = ticket.pending.popleft()
                first = ticket.loaded_blocks
                blocks = self._granted(ticket.job.nonce, first, handle)
                full = blocks[: max(0, whole - first)]
                share(full)
                metrics.ADOPTED_BLOCKS.inc(len(full))
                for last in blocks[len(full) :]:
                    self._pool.copy(last, own[0])
                ticket.loaded_blocks += len(blocks)

    def _granted(self, nonce: int, first: int, handle: Handle) -> list[int]:
        blocks = self._kv.granted(nonce, first, [span.address for span in handle.spans])
        if blocks is None:
            raise EpdError(
                ErrorKind.TRANSFER_FAILED, "prefill in this process no longer leases these blocks"
            )
        return blocks

    async def _read(
        self, ticket: Ticket, blocks: Sequence[int], handle: Handle, spans: Sequence[Span]
    ) -> None:
        """Copy `spans` of the handle, in order, into `blocks`, and verify each."""
        watch = Stopwatch()
        stats = await read_verified(
            self._memory.engine,
            handle.owner,
            self._spec.fingerprint,
            [(self._pool.address(b), span) for b, span in zip(blocks, spans, strict=True)],
            self._pool,
            handle.read_deadline_ms / 1000,
            what="KV blocks",
            kind="kv",
            key=ticket.read_key,
        )
        if self._pool.mirrored:
            await self._copy_to_device(ticket.read_key, blocks)
        ticket.transfer_ms += watch.ms
        ticket.transfer_bytes += stats.nbytes

    async def _copy_to_device(self, key: Hashable, blocks: Sequence[int]) -> None:
        """In a thread, which goes on when this is cancelled: see `when_settled`."""
        copying = asyncio.create_task(asyncio.to_thread(self._pool.from_peers, blocks))
        self._copying[key] = copying
        copying.add_done_callback(lambda _: self._copying.pop(key))
        await asyncio.shield(copying)
