"""Which block is free, and how many holders each other one has. Pure bookkeeping.

Invariants (`check_integrity`), for every block:

    | holders | kept | where            | meaning                                     |
    |---------|------|------------------|---------------------------------------------|
    | 0       | no   | free list, once  | free                                        |
    | 0       | yes  | idle list, once  | cached: free for whoever needs it, last     |
    | n > 0   | any  | neither          | n holders: requests, leases                 |

A cache keeps blocks and holds none: what it keeps can always be had (`allocate` takes
what has been idle longest), so a cache never makes anybody wait. A block with more than
one holder, and a kept one, is read-only for all.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable


class OutOfBlocks(Exception):
    """Fewer blocks can be had than were asked for; nothing was allocated."""

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(f"{wanted} blocks wanted, {free} free")
        self.wanted = wanted
        self.free = free


class BlockAllocator:
    """Holders of blocks 0 .. num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self.on_evicted: Callable[[int], None] = lambda block: None
        """Told of a kept block that is given to somebody else now."""
        self._references = [0] * num_blocks
        # First in, first out: a freed block is written again as late as possible,
        # which makes a use after free more likely to be seen by a checksum.
        self._free = deque(range(num_blocks))
        self._kept: set[int] = set()
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def free_count(self) -> int:
        """Blocks that `allocate` can give."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Blocks with at least one holder."""
        return self.num_blocks - self.free_count

    @property
    def kept(self) -> int:
        """Blocks that a cache keeps."""
        return len(self._kept)

    @property
    def idle(self) -> int:
        """Of the kept ones, those without a holder."""
        return len(self._idle)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one holder each, or none. Evicts where it must.

        Raises:
            OutOfBlocks: fewer can be had; nothing was evicted.
        """
        assert count >= 0
        if count > self.free_count:
            raise OutOfBlocks(count, self.free_count)
        blocks = [self._take() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def _take(self) -> int:
        if self._free:
            return self._free.popleft()
        block, _ = self._idle.popitem(last=False)
        self._kept.remove(block)
        self.on_evicted(block)
        return block

    def share(self, block: int) -> None:
        """One more holder of a block that has one, or is kept."""
        if self._references[block] == 0:
            assert block in self._idle, f"block {block} is free and can't be shared"
            del self._idle[block]
        self._references[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """One holder less for each; without holders a block is free at once, or idle.

        From the last to the first: of a sequence's blocks the last is evicted first,
        since none is of use without those before it.
        """
        for block in reversed(list(blocks)):
            assert self._references[block] > 0, f"block {block} freed twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._release(block)

    def _release(self, block: int) -> None:
        if block in self._kept:
            self._idle[block] = None
        else:
            self._free.append(block)

    def keep(self, block: int) -> None:
        """Let a held block be idle, not free, when its last holder leaves."""
        assert self._references[block] > 0, f"block {block} is free and can't be kept"
        self._kept.add(block)

    def forget(self, block: int) -> None:
        """A kept block is kept no more; free if nobody holds it."""
        self._kept.remove(block)
        if self._references[block] == 0:
            del self._idle[block]
            self._free.append(block)

    def references(self, block: int) -> int:
        """Number of holders."""
        return self._references[block]

    def check_integrity(self) -> None:
        """Assert the table at the top of this file."""
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert not free & self._kept, "a free block is kept"
        for block, references in enumerate(self._references):
            assert references >= 0, f"block {block} has {references} holders"
            unheld, kept = references == 0, block in self._kept
            assert (unheld and not kept) == (block in free), f"block {block}: {references} holders"
            assert (unheld and kept) == (block in idle), f"block {block}: {references} holders"
