"""The embedding cache against a ledger of bytes: nothing in use goes, nothing leaks."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from encode.cache import EmbeddingCache, Entry

BUDGET = 100
KEYS = st.sampled_from([b"a", b"b", b"c", b"d", b"e"])


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.freed: set[int] = set()
        self.places = 0
        self.cache: EmbeddingCache[int] = EmbeddingCache(BUDGET, self.free)
        self.pins: list[Entry[int]] = []
        self.last_use: dict[int, int] = {}
        self.clock = 0

    def free(self, place: int) -> None:
        assert place not in self.freed, "freed twice"
        assert all(entry.place != place for entry in self.pins), "freed while it is used"
        self.freed.add(place)

    def used(self, entry: Entry[int]) -> None:
        self.clock += 1
        self.last_use[entry.place] = self.clock

    @rule(key=KEYS, nbytes=st.integers(1, 60), pins=st.integers(0, 3))
    def look_up_or_add(self, key: bytes, nbytes: int, pins: int) -> None:
        entry = self.cache.take(key)
        if entry is None:
            place, self.places = self.places, self.places + 1
            self.last_use[place] = self.clock = self.clock + 1
            entry = self.cache.add(key, place, nbytes, 0, pins)
            assert pins == 0 or place not in self.freed
        else:
            assert entry.key == key
            assert entry.place not in self.freed
            pins = 1
        self.pins += [entry] * pins

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        entry = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.used(entry)
        self.cache.unpin(entry)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.pins))
        self.cache.retire(entry)
        found = self.cache.take(entry.key)
        assert found is not entry, "rows in doubt were given to somebody"
        if found is not None:
            self.pins.append(found)

    @rule()
    def evict(self) -> None:
        before, idle = set(self.freed), self.cache.idle
        assert self.cache.evict() is bool(idle)
        if idle:
            (gone,) = self.freed - before
            others = {
                place
                for place in range(self.places)
                if place not in self.freed and all(e.place != place for e in self.pins)
            }
            assert all(self.last_use[gone] < self.last_use[other] for other in others)

    @invariant()
    def holds(self) -> None:
        self.cache.check_integrity()
        held = {entry.place for entry in self.pins}
        assert not held & self.freed
        assert self.places - len(self.freed) - len(held) == self.cache.idle


CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
test_random_use = CacheMachine.TestCase


def filled(budget: int, *keys: bytes) -> tuple[EmbeddingCache[bytes], list[bytes]]:
    freed: list[bytes] = []
    cache: EmbeddingCache[bytes] = EmbeddingCache(budget, freed.append)
    for key in keys:
        cache.add(key, key, 10, 0, pins=0)
    return cache, freed


def test_the_one_used_longest_ago_gives_way() -> None:
    cache, freed = filled(30, b"a", b"b", b"c")
    entry = cache.take(b"a")
    assert entry is not None
    cache.unpin(entry)
    cache.add(b"d", b"d", 10, 0, pins=1)
    assert freed == [b"b"]


def test_what_is_used_stays_whatever_is_asked_for() -> None:
    cache, freed = filled(20, b"a")
    entry = cache.take(b"a")
    cache.add(b"b", b"b", 20, 0, pins=1)
    assert not freed
    assert not cache.evict()
    assert entry is not None
    cache.unpin(entry)
    assert freed == [b"a"], "over the budget: gone with its last reader"


def test_switched_off_it_keeps_and_finds_nothing() -> None:
    cache, freed = filled(0)
    entry = cache.add(b"a", b"a", 10, 0, pins=2)
    assert cache.take(b"a") is None
    cache.unpin(entry)
    assert not freed
    cache.unpin(entry)
    assert freed == [b"a"]
