"""Block allocator: nothing overlaps, nothing is lost, counts are conserved."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epd.kv.blocks import BlockAllocator, OutOfBlocks

BLOCKS = 12


class AllocatorMachine(RuleBasedStateMachine):
    """Random holders and a cache that keeps, against a model that only counts."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(BLOCKS)
        self.allocator.on_evicted = self.evicted
        self.held: list[int] = []
        """One entry for each (holder, block)."""
        self.kept: set[int] = set()

    @property
    def idle(self) -> set[int]:
        return self.kept - set(self.held)

    def evicted(self, block: int) -> None:
        assert block in self.idle
        self.kept.remove(block)

    @rule(count=st.integers(0, BLOCKS + 2))
    def allocate(self, count: int) -> None:
        free = BLOCKS - len(set(self.held))
        kept = set(self.kept)
        if count > free:
            with pytest.raises(OutOfBlocks) as raised:
                self.allocator.allocate(count)
            assert (raised.value.wanted, raised.value.free) == (count, free)
            assert self.kept == kept, "evicted for nothing"
            return
        never_used = free - len(self.idle)
        blocks = self.allocator.allocate(count)
        assert len(set(blocks)) == count
        assert not set(blocks) & (set(self.held) | self.kept), "a held block was given away"
        assert len(kept - self.kept) == max(0, count - never_used), "evicted more than needed"
        self.held += blocks

    @precondition(lambda self: self.held or self.kept)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted({*self.held, *self.kept})))
        self.allocator.share(block)
        self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.held)))
        blocks = data.draw(st.permutations(self.held))[:count]
        self.allocator.free(blocks)
        self.held = list((Counter(self.held) - Counter(blocks)).elements())

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.allocator.keep(block)
        self.kept.add(block)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.kept)))
        self.allocator.forget(block)
        self.kept.remove(block)

    @invariant()
    def counts_are_conserved(self) -> None:
        self.allocator.check_integrity()
        holders = Counter(self.held)
        assert self.allocator.used == len(holders)
        assert self.allocator.used + self.allocator.free_count == BLOCKS
        assert self.allocator.kept == len(self.kept)
        assert self.allocator.idle == len(self.idle)
        assert all(self.allocator.references(b) == holders[b] for b in range(BLOCKS))


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_allocation_is_all_or_nothing() -> None:
    allocator = BlockAllocator(4)
    allocator.allocate(3)
    with pytest.raises(OutOfBlocks):
        allocator.allocate(2)
    assert allocator.free_count == 1


def test_shared_block_is_free_after_its_last_holder() -> None:
    allocator = BlockAllocator(1)
    (block,) = allocator.allocate(1)
    allocator.share(block)
    allocator.free([block])
    assert allocator.used == 1
    allocator.free([block])
    assert allocator.allocate(1) == [block]


def test_double_free_and_sharing_a_free_block_are_caught() -> None:
    allocator = BlockAllocator(2)
    (block,) = allocator.allocate(1)
    allocator.free([block])
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free([block])
    with pytest.raises(AssertionError, match="can't be shared"):
        allocator.share(block)


def test_integrity_check_notices_damage() -> None:
    allocator = BlockAllocator(3)
    allocator._references[1] = 1
    with pytest.raises(AssertionError):
        allocator.check_integrity()


@given(st.integers(1, 50))
def test_freed_blocks_are_reused_last(count: int) -> None:
    allocator = BlockAllocator(count + 1)
    (first,) = allocator.allocate(1)
    allocator.free([first])
    assert allocator.allocate(count + 1)[-1] == first


def test_idle_blocks_go_last_and_the_one_idle_longest_first() -> None:
    allocator = BlockAllocator(6)
    evicted: list[int] = []
    allocator.on_evicted = evicted.append
    first, second = allocator.allocate(2), allocator.allocate(2)
    for block in (*first, *second):
        allocator.keep(block)
    allocator.free(second)
    allocator.free(first)
    allocator.share(second[0])
    allocator.free([second[0]])  # used again: now the youngest
    assert not set(allocator.allocate(2)) & {*first, *second}
    assert not evicted
    allocator.allocate(4)
    assert evicted == [second[1], first[1], first[0], second[0]]
