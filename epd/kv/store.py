"""A worker's KV cache as one thing: the memory, who holds which block, what is cached.

Built once and handed to the worker, so that workers of one process can share it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from epd.jobs import ImageItem
from epd.kv.blocks import BlockAllocator
from epd.kv.grants import Grants
from epd.kv.layout import KvLayout
from epd.kv.pool import KvPool
from epd.kv.prefix import BlockChain, Count, PrefixCache, root_hash, uncounted


class KvStore:
    """`num_blocks` blocks of `layout` on `device`; owns their memory.

    `fingerprint` and `numerics_id` name what computes the blocks: others' are not found.
    `cached` off: nothing outlives its request. `mirrored`: see `KvPool`.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        device: str | torch.device,
        *,
        fingerprint: str,
        numerics_id: str,
        cached: bool,
        mirrored: bool | None = None,
        count: Count = uncounted,
    ) -> None:
        self.layout = layout
        self.pool = KvPool(layout, num_blocks, device, mirrored=mirrored)
        self.blocks = BlockAllocator(num_blocks)
        self.prefix = PrefixCache(self.blocks, enabled=cached, count=count)
        self.grants = Grants()
        self._names = (fingerprint, numerics_id)

    def chain(
        self,
        token_ids: Sequence[int],
        items: Sequence[ImageItem],
        *,
        image_token_id: int,
        prompt_length: int,
        salt: bytes,
    ) -> BlockChain:
        """Hashes of a request's blocks. Milliseconds for thousands of tokens; touches
        nothing shared, so any thread may call it."""
        return BlockChain(
            root_hash(*self._names, self.layout, salt),
            token_ids,
            items,
            image_token_id=image_token_id,
            prompt_length=prompt_length,
            block_tokens=self.layout.block_tokens,
        )

    def sums(self, blocks: Sequence[int]) -> list[int]:
        """Checksums of cached blocks that the caller holds, up to the first that has none:
        one that decode filled. It is summed with those that the caller's next step fills,
        since a device's copy to the host waits for what runs there, and no event loop may."""
        known: list[int] = []
        for block in blocks:
            total = self.prefix.checksum_of(block)
            if total is None:
                break
            known.append(total)
        return known

    def granted(self, nonce: int, first: int, addresses: Sequence[int]) -> list[int] | None:
        """The blocks at these addresses, if prefill in this process has just these under
        lease for the attempt `nonce`, from its block `first` on; else None."""
        blocks = [self.pool.block_at(address) for address in addresses]
        found = [block for block in blocks if block is not None]
        whole = len(found) == len(blocks) and self.grants.find(nonce, first, found)
        return found if whole else None

    def state(self) -> dict[str, object]:
        """Counts for /metrics; idle cached blocks are not used ones."""
        return {
            "kv_blocks_used": self.blocks.used,
            "kv_blocks": self.blocks.num_blocks,
            "kv_blocks_cached": self.blocks.kept,
            "kv_blocks_pinned": self.blocks.kept - self.blocks.idle,
            "kv_block_bytes": self.layout.block_bytes,
        }

    def check_integrity(self) -> None:
        self.prefix.check_integrity()
