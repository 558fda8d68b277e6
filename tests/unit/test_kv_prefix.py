"""Prefix hashes tell apart what must be apart; the cache pins, evicts and loses nothing."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epd.jobs import ImageItem
from epd.kv.blocks import BlockAllocator, OutOfBlocks
from epd.kv.prefix import PrefixCache, block_hashes, root_hash

SIZE = 4
IMAGE = 9
ROOT = root_hash("model", SIZE)


def item(name: str, rows: int) -> ImageItem:
    return ImageItem(0, name.encode() * 32, rows, (), 1, 1, 1)


def hashes(
    ids: list[int], items: tuple[ImageItem, ...] = (), root: bytes = ROOT, prompt: int | None = None
) -> list[bytes]:
    return block_hashes(
        root,
        ids,
        items,
        image_token_id=IMAGE,
        prompt_length=len(ids) if prompt is None else prompt,
        block_tokens=SIZE,
    )


tokens = st.lists(st.integers(0, 8), max_size=24)


@given(tokens, tokens)
def test_hashes_agree_exactly_as_far_as_the_blocks_do(a: list[int], b: list[int]) -> None:
    ours, theirs = hashes(a), hashes(b)
    assert len(ours) == len(a) // SIZE
    for i, (x, y) in enumerate(zip(ours, theirs, strict=False)):
        assert (x == y) == (a[: (i + 1) * SIZE] == b[: (i + 1) * SIZE])


@given(tokens, tokens)
def test_a_longer_prompt_keeps_the_hashes_of_its_start(a: list[int], more: list[int]) -> None:
    assert hashes(a + more)[: len(hashes(a))] == hashes(a)


@given(st.lists(st.sampled_from(["t", "i"]), min_size=1, max_size=24), st.data())
def test_another_image_changes_every_block_from_its_first_row_on(
    kinds: list[str], data: st.DataObject
) -> None:
    ids = [IMAGE if kind == "i" else 1 for kind in kinds]
    rows = ids.count(IMAGE)
    if not rows:
        return
    cut = data.draw(st.integers(0, rows - 1))
    first = item("a", cut), item("b", rows - cut)
    second = item("a", cut), item("c", rows - cut)
    places = [i for i, token in enumerate(ids) if token == IMAGE]
    for i, (x, y) in enumerate(zip(hashes(ids, first), hashes(ids, second), strict=True)):
        assert (x == y) == ((i + 1) * SIZE <= places[cut])


def test_rows_of_an_image_are_told_apart_by_their_offset() -> None:
    """Two cuts of the same pictures: same ids, same digests, other rows."""
    ids = [IMAGE] * 8
    assert hashes(ids, (item("a", 5), item("a", 3))) != hashes(ids, (item("a", 4), item("a", 4)))
    ids = [1, 2, 3, *[IMAGE] * 5]
    again, going_on = hashes(ids, (item("a", 1), item("a", 4))), hashes(ids, (item("a", 5),))
    assert again[0] == going_on[0]
    assert again[1] != going_on[1]


def test_a_generated_placeholder_is_no_image() -> None:
    ids = [1, 2, 3, IMAGE]
    assert hashes(ids, (item("a", 1),)) != hashes(ids, (), prompt=3)


@pytest.mark.parametrize(
    "root", [root_hash("other", SIZE), root_hash("model", 8), root_hash("model", SIZE, b"tenant")]
)
def test_model_block_size_and_salt_separate(root: bytes) -> None:
    assert not set(hashes([1] * 8)) & set(hashes([1] * 8, root=root))


def test_root_does_not_run_fields_together() -> None:
    assert root_hash("a", SIZE, b"bc") != root_hash("ab", SIZE, b"c")


def test_placeholders_and_rows_must_match() -> None:
    with pytest.raises(AssertionError, match="placeholders"):
        hashes([IMAGE] * 4, (item("a", 3),))


BLOCKS = 10


class CacheMachine(RuleBasedStateMachine):
    """Requests that look up, compute, insert and free, against counted holders."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(BLOCKS)
        self.cache = PrefixCache(self.allocator)
        self.requests: list[list[int]] = []
        self.content: dict[int, bytes] = {}
        """What was computed last into each block."""

    @rule(ids=st.lists(st.integers(0, 2), min_size=SIZE, max_size=5 * SIZE))
    def request(self, ids: list[int]) -> None:
        chain = hashes(ids)
        found = self.cache.lookup(chain)
        assert [self.content[block] for block in found] == chain[: len(found)]
        try:
            new = self.cache.allocate(len(chain) - len(found))
        except OutOfBlocks:
            self.allocator.free(found)
            return
        assert not set(new) & {b for blocks in self.requests for b in blocks}
        self.content.update(zip(new, chain[len(found) :], strict=True))
        blocks = found + new
        self.requests.append(blocks)
        self.cache.insert(chain, blocks)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.requests) - 1))
        self.allocator.free(self.requests.pop(index))

    @rule(count=st.integers(0, BLOCKS))
    def evict(self, count: int) -> None:
        evictable = self.cache.evictable
        assert self.cache.evict(count) == min(count, evictable)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.cache.check_integrity()
        holders = Counter(block for blocks in self.requests for block in blocks)
        cached = set(self.cache._blocks.values())
        for block in range(BLOCKS):
            assert self.allocator.references(block) == holders[block] + (block in cached)
        assert self.cache.evictable == len(cached - set(holders))

    def teardown(self) -> None:
        for blocks in self.requests:
            self.allocator.free(blocks)
        self.cache.clear()
        assert self.allocator.used == 0
        self.allocator.check_integrity()


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def _cached(cache: PrefixCache, allocator: BlockAllocator, ids: list[int]) -> list[int]:
    chain = hashes(ids)
    blocks = cache.allocate(len(chain))
    cache.insert(chain, blocks)
    allocator.free(blocks)
    return blocks


def test_a_hit_pins_its_blocks() -> None:
    allocator = BlockAllocator(4)
    cache = PrefixCache(allocator)
    blocks = _cached(cache, allocator, [1] * 8)
    assert cache.lookup(hashes([1] * 8)) == blocks
    assert cache.evict(4) == 0
    with pytest.raises(OutOfBlocks):
        cache.allocate(3)
    allocator.free(blocks)
    assert cache.evict(4) == 2


def test_a_chain_is_evicted_from_its_end_and_the_oldest_chain_first() -> None:
    allocator = BlockAllocator(8)
    cache = PrefixCache(allocator)
    _cached(cache, allocator, [1] * 12)
    _cached(cache, allocator, [2] * 8)
    allocator.free(cache.lookup(hashes([1] * 12)))  # now the chain of 2 is the oldest
    cache.evict(1)
    remaining = [len(cache.lookup(hashes([n] * 12))) for n in (1, 2)]
    assert remaining == [3, 1]


def test_allocate_evicts_nothing_when_it_fails() -> None:
    allocator = BlockAllocator(4)
    cache = PrefixCache(allocator)
    _cached(cache, allocator, [1] * 8)
    allocator.allocate(2)
    with pytest.raises(OutOfBlocks):
        cache.allocate(3)
    assert len(cache) == 2
