"""Arena: nothing overlaps, nothing is lost, what is free is really usable."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from epd.errors import EpdError, ErrorKind
from epd.transfer.arena import Arena, Extent, Extents


class ExtentsMachine(RuleBasedStateMachine):
    """Random allocate and free against a map of who owns each byte."""

    SIZE, ALIGNMENT = 1024, 16
    extents = Bundle("extents")

    def __init__(self) -> None:
        super().__init__()
        self.arena = Extents(self.SIZE, self.ALIGNMENT)
        self.owner: list[Extent | None] = [None] * self.SIZE

    def longest_gap(self) -> int:
        text = "".join("x" if owner else "." for owner in self.owner)
        return max(map(len, text.split("x")))

    @rule(target=extents, nbytes=st.integers(1, 300))
    def allocate(self, nbytes: int) -> Extent | None:
        need = -(-nbytes // self.ALIGNMENT) * self.ALIGNMENT
        try:
            extent = self.arena.allocate(nbytes)
        except EpdError as error:
            kind = error.kind
            assert kind is ErrorKind.OVERLOADED
            assert self.longest_gap() < need, "refused although it fits"
            return None
        assert extent.nbytes == nbytes
        place = range(extent.offset, extent.offset + need)
        assert all(self.owner[byte] is None for byte in place), "overlap"
        for byte in place:
            self.owner[byte] = extent
        return extent

    @rule(extent=consumes(extents))
    def free(self, extent: Extent | None) -> None:
        if extent is not None:
            self.arena.free(extent)
            self.owner = [None if owner is extent else owner for owner in self.owner]

    @invariant()
    def counts_agree(self) -> None:
        self.arena.check_integrity()
        assert self.arena.used_bytes == sum(owner is not None for owner in self.owner)
        assert self.arena.largest_free == self.longest_gap()


ExtentsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestExtents = ExtentsMachine.TestCase


def test_takes_the_smallest_piece_that_fits() -> None:
    arena = Extents(1024, 16)
    gap, _, large, _ = (arena.allocate(n) for n in (64, 16, 256, 16))
    arena.free(large)
    arena.free(gap)
    assert arena.allocate(50).offset == gap.offset


def test_freeing_twice_is_caught() -> None:
    arena = Extents(256, 16)
    extent = arena.allocate(10)
    arena.free(extent)
    with pytest.raises(AssertionError, match="not reserved"):
        arena.free(extent)


def test_an_equal_but_older_extent_can_not_free_its_successor() -> None:
    arena = Extents(256, 16)
    old = arena.allocate(10)
    arena.free(old)
    new = arena.allocate(10)
    assert old == new
    with pytest.raises(AssertionError, match="not reserved"):
        arena.free(old)


def test_full_says_how_full() -> None:
    arena = Extents(256, 16)
    arena.allocate(200)
    with pytest.raises(EpdError, match="100 bytes asked, 48 of 256 free, largest piece 48"):
        arena.allocate(100)


@pytest.mark.parametrize("nbytes", [0, -16, 100])
def test_size_must_be_a_positive_multiple_of_the_alignment(nbytes: int) -> None:
    with pytest.raises(ValueError, match="multiple"):
        Extents(nbytes, 16)


def test_check_integrity_finds_a_lost_extent() -> None:
    arena = Extents(256, 16)
    extent = arena.allocate(10)
    del arena._used[extent.offset]
    with pytest.raises(AssertionError, match="gap or overlap"):
        arena.check_integrity()


def test_arena_bytes_are_where_the_extents_say() -> None:
    arena = Arena(1 << 16)
    first, second = arena.allocate(100), arena.allocate(100)
    arena.view(first).fill_(1)
    arena.view(second).fill_(2)
    assert arena.view(first).sum() == 100
    assert arena.view(second).data_ptr() == arena.address_of(second)
    assert arena.tensor.sum() == 300
