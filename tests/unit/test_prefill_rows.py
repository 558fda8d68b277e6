"""Places in landing memory: shared, kept, given away at the right time, never lost."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epd.transfer.arena import Extents
from prefill.rows import Rows, RowTable

UNIT = 64
ARENA = 8 * UNIT


def make(enabled: bool = True) -> tuple[RowTable, Counter[str]]:
    counted: Counter[str] = Counter()
    table = RowTable(
        Extents(ARENA), enabled=enabled, count=lambda event, n: counted.update({event: n})
    )
    return table, counted


def land(table: RowTable, rows: Rows) -> None:
    table.reading(rows)
    table.landed(rows)


def take(table: RowTable, *wanted: tuple[str, int]) -> list[Rows]:
    found = table.reserve([(name.encode(), units * UNIT) for name, units in wanted])
    assert found is not None
    return found


def test_rows_that_landed_are_found_again_and_pinned_while_used() -> None:
    table, counted = make()
    (a,) = take(table, ("a", 3))
    assert not a.ready
    land(table, a)
    table.release(a)
    (again,) = take(table, ("a", 3))
    assert again is a
    assert again.ready
    assert table.reserve([(b"b", 6 * UNIT)]) is None, "pinned"
    table.release(again)
    take(table, ("b", 6))
    assert counted == {"miss": 2, "hit": 1, "joined": 0, "evicted": 1}


def test_equal_pictures_of_one_request_share_a_place() -> None:
    table, _ = make()
    a, b, again = take(table, ("a", 3), ("b", 2), ("a", 3))
    assert a is again
    assert a.holders == 2
    for rows in (a, b, again):
        table.release(rows)
    assert len(table) == 0, "nothing landed: nothing stays"
    table.check_integrity()


def test_the_least_recently_used_goes_first_and_only_as_many_as_needed() -> None:
    table, counted = make()
    for name in ("a", "b", "c", "d"):
        (rows,) = take(table, (name, 2))
        land(table, rows)
        table.release(rows)
    table.release(take(table, ("a", 2))[0])
    take(table, ("e", 2))
    assert counted["evicted"] == 1
    assert take(table, ("a", 2))[0].ready
    assert not take(table, ("b", 2))[0].ready


def test_what_cannot_fit_yet_evicts_nothing() -> None:
    table, counted = make()
    (kept,) = take(table, ("kept", 2))
    land(table, kept)
    table.release(kept)
    take(table, ("running", 4))
    assert table.reserve([(b"large", 5 * UNIT)]) is None
    assert counted["evicted"] == 0


def test_an_idle_picture_in_the_middle_never_blocks_the_largest_request() -> None:
    """It wants that picture and two more, which only fit where the idle one is moved."""
    table, _ = make()
    first, middle, last = take(table, ("x", 3), ("m", 2), ("y", 3))
    land(table, middle)
    for rows in (first, middle, last):
        table.release(rows)
    places = take(table, ("m", 2), ("z", 6))
    assert not places[0].ready, "it must be fetched again: better than to wait for ever"
    table.check_integrity()


def test_a_place_that_a_read_may_write_into_is_not_given_away() -> None:
    table, _ = make()
    (a,) = take(table, ("a", 8))
    table.reading(a)
    table.release(a)
    assert table.reserve([(b"b", UNIT)]) is None
    table.check_integrity()
    table.settled(a)
    take(table, ("b", 8))


def test_a_read_that_nobody_waits_for_any_more_is_not_joined() -> None:
    """Its source may be reused at any moment."""
    table, _ = make()
    (a,) = take(table, ("a", 2))
    table.reading(a)
    table.release(a)
    (other,) = take(table, ("a", 2))
    assert other is not a
    table.settled(a)
    table.check_integrity()


def test_doubtful_rows_are_found_by_nobody_else() -> None:
    table, _ = make()
    (a,) = take(table, ("a", 2))
    land(table, a)
    table.forget(a)
    assert take(table, ("a", 2))[0] is not a
    table.release(a)
    table.check_integrity()


def test_switched_off_nothing_is_shared_and_nothing_stays() -> None:
    table, counted = make(enabled=False)
    a, again = take(table, ("a", 2), ("a", 2))
    assert a is not again
    land(table, a)
    for rows in (a, again):
        table.release(rows)
    assert table.idle_bytes == 0
    assert take(table, ("a", 8))
    assert not counted


class Machine(RuleBasedStateMachine):
    """Requests that reserve, read, fail, land and leave in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.extents = Extents(ARENA)
        self.table = RowTable(self.extents, enabled=True, count=lambda event, n: None)
        self.requests: list[list[Rows]] = []
        self.reading: list[Rows] = []
        self.content: dict[int, object] = {}
        """What was read last to each offset."""

    @rule(
        wanted=st.lists(
            st.tuples(st.sampled_from("abcd"), st.integers(1, 3)), min_size=1, max_size=3
        )
    )
    def request(self, wanted: list[tuple[str, int]]) -> None:
        keys = [(name.encode(), size * UNIT) for name, size in wanted]
        if sum(size for _, size in keys) > ARENA:
            return
        found = self.table.reserve(keys)
        if found is None:
            assert self.requests or self.reading, "a request waits for nobody"
            return
        self.requests.append(found)
        for key, rows in zip(keys, found, strict=True):
            assert rows.key == key
            assert rows.extent.nbytes == key[1]
            if rows.ready:
                assert self.content[rows.extent.offset] == key

    def pick(self, data: st.DataObject, ready: bool, busy: bool) -> Rows | None:
        rows = [r for held in self.requests for r in held if (r.ready, r.busy) == (ready, busy)]
        return data.draw(st.sampled_from(rows)) if rows else None

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        rows = self.pick(data, ready=False, busy=False)
        if rows is not None:
            self.table.reading(rows)
            self.reading.append(rows)
            self.content[rows.extent.offset] = "half"

    @precondition(lambda self: self.reading)
    @rule(data=st.data(), good=st.booleans())
    def end(self, data: st.DataObject, good: bool) -> None:
        rows = self.reading.pop(data.draw(st.integers(0, len(self.reading) - 1)))
        if good:
            self.content[rows.extent.offset] = rows.key
            self.table.landed(rows)
        else:
            self.table.settled(rows)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), doubt=st.booleans())
    def leave(self, data: st.DataObject, doubt: bool) -> None:
        for rows in self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1))):
            if doubt:
                self.table.forget(rows)
            self.table.release(rows)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.table.check_integrity()
        holders = Counter(rows for held in self.requests for rows in held)
        assert all(rows.holders == count for rows, count in holders.items())
        used = {*holders, *self.reading}
        places = [(r.extent.offset, r.extent.offset + r.extent.nbytes) for r in used]
        places.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
        rounded = sum(self.extents.rounded(rows.extent.nbytes) for rows in used)
        assert self.extents.used_bytes == rounded + self.table.idle_bytes

    def teardown(self) -> None:
        for rows in [rows for held in self.requests for rows in held]:
            self.table.release(rows)
        for rows in self.reading:
            self.table.settled(rows)
        assert self.extents.used_bytes == self.table.idle_bytes
        assert self.table.reserve([(b"largest", ARENA)]) is not None, "all can be had"
        self.table.check_integrity()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_requests_one_after_another_never_wait(sizes: list[int]) -> None:
    table, _ = make()
    for number, size in enumerate(sizes):
        wanted = [(f"{number % 5}-{size}", size), (f"{number % 3}-{size}", size)]
        for rows in (held := take(table, *wanted)):
            if not rows.ready:
                land(table, rows)
        for rows in held:
            table.release(rows)
    table.check_integrity()


def test_releasing_twice_is_noticed() -> None:
    table, _ = make()
    (a,) = take(table, ("a", 1))
    table.release(a)
    with pytest.raises(AssertionError):
        table.release(a)
