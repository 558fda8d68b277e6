"""Which block is free, and how many holders each other one has. Pure bookkeeping.

Invariants (`check_integrity`), for every block:

    | references | in the free list | meaning                              |
    |------------|------------------|--------------------------------------|
    | 0          | exactly once     | free                                 |
    | n > 0      | no               | n holders: requests, caches, leases  |

A block with more than one holder is read-only for all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class OutOfBlocks(Exception):
    """Fewer blocks are free than were asked for; nothing was allocated."""

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(f"{wanted} blocks wanted, {free} free")
        self.wanted = wanted
        self.free = free


class BlockAllocator:
    """Reference counts over blocks 0 .. num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        # First in, first out: a freed block is written again as late as possible,
        # which makes a use after free more likely to be seen by a checksum.
        self._free = deque(range(num_blocks))

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks with at least one holder."""
        return self.num_blocks - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one holder each, or none.

        Raises:
            OutOfBlocks: fewer are free.
        """
        assert count >= 0
        if count > len(self._free):
            raise OutOfBlocks(count, len(self._free))
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """One more holder of a block that has one."""
        assert self._references[block] > 0, f"block {block} is free and can't be shared"
        self._references[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """One holder less for each; without holders a block is free at once."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} freed twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)

    def references(self, block: int) -> int:
        """Number of holders."""
        return self._references[block]

    def check_integrity(self) -> None:
        """Assert the table at the top of this file."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free list twice"
        for block, references in enumerate(self._references):
            assert references >= 0, f"block {block} has {references} holders"
            assert (references == 0) == (block in free), f"block {block}: {references} holders"
