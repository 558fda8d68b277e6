"""Prefix hashes tell apart what must be apart; the cache pins, evicts and loses nothing."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epd.jobs import ImageItem
from epd.kv.blocks import BlockAllocator
from epd.kv.layout import KvLayout, LayerShape
from epd.kv.prefix import BlockChain, CacheEvent, PrefixCache, root_hash

SIZE = 4
IMAGE = 9
LAYOUT = KvLayout(SIZE, "float32", (LayerShape(1, 2, 2),))
ROOT = root_hash("model", "numerics", LAYOUT)


def item(name: str, rows: int) -> ImageItem:
    return ImageItem(0, name.encode() * 32, rows, (), 1, 1, 1)


def chain(
    ids: list[int], items: tuple[ImageItem, ...] = (), root: bytes = ROOT, prompt: int | None = None
) -> BlockChain:
    return BlockChain(
        root,
        ids,
        items,
        image_token_id=IMAGE,
        prompt_length=len(ids) if prompt is None else prompt,
        block_tokens=SIZE,
    )


def hashes(
    ids: list[int], items: tuple[ImageItem, ...] = (), root: bytes = ROOT, prompt: int | None = None
) -> list[bytes]:
    return chain(ids, items, root, prompt).hashes


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


@given(tokens, st.lists(st.lists(st.integers(0, IMAGE), max_size=7), max_size=6))
def test_a_chain_grows_as_if_it_had_been_whole_from_the_start(
    prompt: list[int], output: list[list[int]]
) -> None:
    """Generated placeholders included; and an image in the prompt's last, partial block."""
    ids = [*prompt, IMAGE, IMAGE]
    growing = chain(ids, (item("a", 2),))
    for more in output:
        growing.extend(more)
    whole = ids + [token for more in output for token in more]
    assert growing.hashes == hashes(whole, (item("a", 2),), prompt=len(ids))


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


@given(st.lists(st.sampled_from("tii"), max_size=30), st.data())
def test_every_placeholder_of_a_block_enters_its_hash_with_its_row(
    kinds: list[str], data: st.DataObject
) -> None:
    """Whatever lies between them."""
    ids = [IMAGE if kind == "i" else 1 for kind in kinds]
    rows = ids.count(IMAGE)
    cut = data.draw(st.integers(0, rows))
    items = tuple(item(name, n) for name, n in (("a", cut), ("b", rows - cut)) if n)
    made = chain(ids, items)
    made._at = 0
    supply = iter([(i.digest, row) for i in items for row in range(i.rows)])
    stands = [next(supply) if token == IMAGE else None for token in ids]
    for start in range(0, len(ids) - SIZE + 1, SIZE):
        found = [
            (digest, first + n)
            for digest, first, count in made._rows_in(start, start + SIZE)
            for n in range(count)
        ]
        assert found == [row for row in stands[start : start + SIZE] if row]


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
    "root",
    [
        root_hash("other", "numerics", LAYOUT),
        root_hash("model", "other", LAYOUT),
        root_hash("model", "numerics", KvLayout(SIZE, "bfloat16", LAYOUT.layers)),
        root_hash("model", "numerics", LAYOUT, b"tenant"),
        root_hash("modelnumerics", "", LAYOUT),
    ],
    ids=["weights", "numerics", "dtype", "tenant", "fields run together"],
)
def test_weights_numerics_dtype_and_tenant_separate(root: bytes) -> None:
    assert not set(hashes([1] * 8)) & set(hashes([1] * 8, root=root))


def test_block_size_separates() -> None:
    """Same tokens, same fingerprint: blocks of other sizes never meet."""
    other = KvLayout(2 * SIZE, "float32", LAYOUT.layers)
    assert root_hash("model", "numerics", other) != ROOT


def test_placeholders_and_rows_must_match() -> None:
    with pytest.raises(AssertionError, match="placeholders"):
        hashes([IMAGE] * 4, (item("a", 3),))


BLOCKS = 10


class CacheMachine(RuleBasedStateMachine):
    """Requests that reserve, compute, insert and free, against counted holders."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(BLOCKS)
        self.counted: Counter[str] = Counter()
        self.cache = PrefixCache(self.allocator, count=self.count)
        self.requests: list[list[int]] = []
        self.content: dict[int, bytes] = {}
        """What was computed last into each block."""

    def count(self, event: CacheEvent, number: int) -> None:
        self.counted[event] += number

    @rule(
        ids=st.lists(st.integers(0, 2), min_size=SIZE, max_size=5 * SIZE),
        more=st.integers(0, 2),
        spare=st.integers(0, 3),
        computed=st.integers(0, 5),
    )
    def request(self, ids: list[int], more: int, spare: int, computed: int) -> None:
        """Of the fresh blocks only the first `computed` get their content."""
        chained = hashes(ids)
        total, before = len(chained) + more, (len(self.cache), self.allocator.used)
        reserved = self.cache.reserve(chained, total, spare)
        if reserved is None:
            assert (len(self.cache), self.allocator.used) == before
            assert total + spare + self.allocator.used > BLOCKS - len(chained)
            return
        self.cache.taken(reserved)
        blocks, cached = reserved.blocks, reserved.cached
        assert len(set(blocks)) == total
        assert [self.content[block] for block in blocks[:cached]] == chained[:cached]
        fresh = blocks[cached:]
        assert not set(fresh) & {b for held in self.requests for b in held}
        for block in fresh:
            self.content[block] = b"something else"
        done = slice(cached, min(cached + computed, len(chained)))
        self.content.update(zip(blocks[done], chained[done], strict=True))
        self.requests.append(blocks)
        self.cache.insert(chained[done], blocks[done])

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.requests) - 1))
        self.allocator.free(self.requests.pop(index))

    @rule(ids=st.lists(st.integers(0, 2), min_size=SIZE, max_size=3 * SIZE))
    def doubt(self, ids: list[int]) -> None:
        self.cache.discard(hashes(ids))

    @invariant()
    def nothing_is_lost(self) -> None:
        self.cache.check_integrity()
        holders = Counter(block for blocks in self.requests for block in blocks)
        cached = set(self.cache._blocks.values())
        for block in range(BLOCKS):
            assert self.allocator.references(block) == holders[block]
        assert self.allocator.used == len(holders), "a cached block is no used one"
        assert self.allocator.idle == len(cached - set(holders))
        assert len(self.cache) <= BLOCKS
        for digest, block in self.cache._blocks.items():
            assert self.content[block] == digest, "the cache names a block that is another's"

    def teardown(self) -> None:
        for blocks in self.requests:
            self.allocator.free(blocks)
        assert self.allocator.free_count == BLOCKS, "all can be had, however full the cache"
        self.cache.clear()
        assert self.allocator.used == self.allocator.kept == 0
        self.allocator.check_integrity()


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def _cached(cache: PrefixCache, allocator: BlockAllocator, ids: list[int]) -> list[int]:
    reserved = cache.reserve(hashes(ids), len(ids) // SIZE)
    assert reserved is not None
    cache.insert(hashes(ids), reserved.blocks)
    allocator.free(reserved.blocks)
    return reserved.blocks


def _found(cache: PrefixCache, allocator: BlockAllocator, ids: list[int]) -> int:
    reserved = cache.reserve(hashes(ids), len(hashes(ids)))
    assert reserved is not None
    allocator.free(reserved.blocks)
    return reserved.cached


def test_a_hit_pins_its_blocks() -> None:
    allocator = BlockAllocator(4)
    cache = PrefixCache(allocator)
    blocks = _cached(cache, allocator, [1] * 8)
    reserved = cache.reserve(hashes([1] * 8), 2)
    assert reserved is not None
    assert (reserved.blocks, reserved.cached) == (blocks, 2)
    assert cache.reserve(hashes([2] * 12), 3) is None
    assert len(cache) == 2
    allocator.free(blocks)
    assert cache.reserve(hashes([2] * 12), 3) is not None
    assert len(cache) == 1


def test_a_chain_is_evicted_from_its_end_and_the_oldest_chain_first() -> None:
    allocator = BlockAllocator(8)
    cache = PrefixCache(allocator)
    _cached(cache, allocator, [1] * 12)
    _cached(cache, allocator, [2] * 8)
    assert _found(cache, allocator, [1] * 12) == 3  # now the chain of 2 is the oldest
    allocator.free(allocator.allocate(4))
    assert _found(cache, allocator, [1] * 12) == 3
    assert _found(cache, allocator, [2] * 4) == 1


def test_a_full_cache_makes_nobody_wait() -> None:
    """A request of maximum size fits a pool that only the cache uses."""
    allocator = BlockAllocator(4)
    counted: Counter[str] = Counter()
    cache = PrefixCache(allocator, count=lambda event, n: counted.update({event: n}))
    _cached(cache, allocator, [1] * 16)
    reserved = cache.reserve(hashes([1] * 4 + [2] * 12), 4)
    assert reserved is not None
    assert reserved.cached == 1
    cache.taken(reserved)
    assert counted == {"hit": 1, "miss": 3, "evicted": 3}


def test_a_block_in_doubt_is_found_no_more_and_its_holders_go_on() -> None:
    allocator = BlockAllocator(4)
    cache = PrefixCache(allocator)
    blocks = _cached(cache, allocator, [1] * 8)
    reserved = cache.reserve(hashes([1] * 8), 2)
    cache.discard(hashes([1] * 8))
    assert _found(cache, allocator, [1] * 8) == 0
    assert reserved is not None
    assert allocator.references(blocks[0]) == 1
    allocator.free(blocks)
    assert allocator.free_count == 4


def test_switched_off_it_finds_and_keeps_nothing() -> None:
    allocator = BlockAllocator(4)
    counted: Counter[str] = Counter()
    off = PrefixCache(allocator, enabled=False, count=lambda event, n: counted.update({event: n}))
    _cached(off, allocator, [1] * 8)
    assert _found(off, allocator, [1] * 8) == 0
    assert len(off) == allocator.kept == 0
    assert not counted


def test_a_sum_that_was_not_given_may_come_later() -> None:
    allocator = BlockAllocator(5)
    cache = PrefixCache(allocator)
    blocks, chained = allocator.allocate(4), hashes([1] * 12)
    sums = lambda: [cache.checksum_of(block) for block in blocks[:3]]  # noqa: E731
    cache.insert(chained[:2], blocks[:2], [7, 8])
    cache.insert(chained[2:], blocks[2:3])
    assert sums() == [7, 8, None]
    cache.insert(chained[2:], blocks[3:], [6])
    assert sums() == [7, 8, None], "that is another block of the same content"
    cache.insert(chained, blocks[:3], [7, 8, 9])
    cache.insert(chained[2:], blocks[2:3])
    assert sums() == [7, 8, 9]
