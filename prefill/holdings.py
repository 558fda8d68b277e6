"""What requests hold of a worker's memory, from reservation to release.

KV blocks (`epd.kv.store`, leased by `leasing`) and landing places (`embeddings`): all of a
request's or none, those of a cached prefix or of a picture that landed before together with
others. The prefix cache keeps full blocks from the step that filled them on, and holds none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from epd.kv.store import KvStore
from epd.models.spec import ModelSpec
from epd.runtime.isolate import doubtful
from epd.runtime.memory import OwnedMemory
from prefill.embeddings import Landing
from prefill.forward import Outcome
from prefill.leasing import KvLessor
from prefill.rows import Rows
from prefill.scheduler import Chunk
from prefill.ticket import KvReady, Ticket

logger = logging.getLogger(__name__)


class Holdings:
    """`freed` is called when memory became free; `most_blocks` is what prefill may hold, of
    a pool that it shares with decode a part."""

    def __init__(
        self,
        spec: ModelSpec,
        kv: KvStore,
        most_blocks: int,
        landing: Landing,
        memory: OwnedMemory,
        freed: Callable[[], None],
    ) -> None:
        self._kv = kv
        self._layout = kv.layout
        self._most_blocks = most_blocks
        self._memory = memory
        self._holders: set[Ticket] = set()
        self._landing = landing
        self._lessor = KvLessor(spec, kv, memory, freed)

    def reserve(self, ticket: Ticket) -> int | None:
        """Blocks of the whole prompt and landing places of all images that it needs, or
        nothing. Returns how many tokens are computed already."""
        # The last token is always computed: its logits are wanted.
        most = (ticket.total - 1) // self._layout.block_tokens
        count = self._layout.blocks_for(ticket.total)
        if not self._within_share(count):
            return None
        reserved = self._kv.prefix.reserve(ticket.chain.hashes[:most], count)
        if reserved is None:
            return None
        cached = reserved.cached * self._layout.block_tokens
        items = [ticket.job.items[span.index] for span in ticket.spans if span.reaches(cached)]
        places = self._landing.reserve(items)
        if places is None:
            self._kv.blocks.free(reserved.blocks)
            return None
        self._kv.prefix.taken(reserved)
        ticket.landing = places
        ticket.blocks = reserved.blocks
        self._holders.add(ticket)
        ticket.sums = self._kv.sums(reserved.blocks[: reserved.cached])
        ticket.cached_tokens = cached
        ticket.missing = _missing(places)
        return cached

    def _within_share(self, more: int) -> bool:
        """Whether prefill may hold so many more blocks. A pool that decode has a part in is
        never prefill's alone: else all of it could wait for a decode that finds no room."""
        if self._kv.blocks.num_blocks == self._most_blocks:
            return True
        held = set[int]().union(*(ticket.blocks for ticket in self._holders))
        lost = self._memory.leases.quarantined_bytes // self._layout.block_bytes
        return len(held) + lost + more <= self._most_blocks

    def keep(self, chunk: Chunk, ticket: Ticket, outcome: Outcome) -> None:
        """Cache the blocks that the chunk filled, whatever becomes of the request."""
        first, hashes = len(ticket.sums), ticket.chain.hashes
        ticket.sums += outcome.sums
        if ticket.damaged:
            return  # the step read what is in doubt
        if any(doubtful(token) for token in outcome.tokens):
            self._kv.prefix.discard(hashes)  # e.g. its logits are no numbers: don't spread that
            self._landing.doubt(ticket.landing.values())
            return
        # From the first that was summed: cached ones that had no sum come before the chunk's.
        full = slice(first, chunk.end // self._layout.block_tokens)
        self._kv.prefix.insert(hashes[full], ticket.blocks[full], ticket.sums[full])

    def announce(self, ticket: Ticket, computed: int) -> KvReady | None:
        """Sealed blocks that its reader doesn't know yet; see `KvLessor.announce`."""
        return self._lessor.announce(ticket, computed)

    def damaged(self, ticket: Ticket) -> None:
        """Its reader found other bytes than were announced: nobody else gets them."""
        logger.error("a reader found damaged blocks", extra={"blocks": len(ticket.blocks)})
        ticket.damaged = True
        self._kv.prefix.discard(ticket.chain.hashes)

    def release_landing(self, ticket: Ticket) -> None:
        """All its rows are computed, or never will be."""
        places, ticket.landing = ticket.landing, {}
        self._landing.release(places.values())

    def release_blocks(self, ticket: Ticket) -> None:
        """See `KvLessor.end`."""
        self._holders.discard(ticket)
        self._lessor.end(ticket)


def _missing(places: Mapping[int, Rows]) -> tuple[int, ...]:
    """Images to ask for: of those that share a place the first, unless the rows are here."""
    first: dict[Rows, int] = {}
    for index, rows in places.items():
        if not rows.ready:
            first.setdefault(rows, index)
    return tuple(first.values())
