"""Encode's batcher against synthetic pictures."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encode.batcher import Batcher
from epd.errors import EpdError, ErrorKind


def always(key: int) -> bool:
    return True


def filled(patches: list[int], budget: int = 100, max_queue: int = 100) -> Batcher:
    batcher = Batcher(budget, max_queue)
    for key, count in enumerate(patches):
        batcher.admit(key)
        batcher.prepared(key, count)
    return batcher


def test_a_batch_stays_within_the_budget_in_order_of_arrival() -> None:
    batcher = filled([40, 40, 40, 10])
    assert batcher.next_batch(always) == [0, 1]
    batcher.complete([0, 1])
    assert batcher.next_batch(always) == [2, 3]


def test_a_picture_larger_than_the_budget_runs_alone() -> None:
    batcher = filled([500, 1])
    assert batcher.next_batch(always) == [0]
    batcher.complete([0])
    assert batcher.next_batch(always) == [1]


def test_no_second_batch_while_one_runs_and_newcomers_join_the_next() -> None:
    batcher = filled([10])
    assert batcher.next_batch(always) == [0]
    batcher.admit(1)
    batcher.prepared(1, 10)
    assert batcher.next_batch(always) == []
    batcher.complete([0])
    assert batcher.next_batch(always) == [1]


def test_a_picture_that_is_not_decoded_yet_does_not_hold_up_others() -> None:
    batcher = Batcher(100, 10)
    batcher.admit(0)
    batcher.admit(1)
    batcher.prepared(1, 10)
    assert batcher.next_batch(always) == [1]


def test_nobody_overtakes_the_first_that_finds_no_place() -> None:
    batcher = filled([10, 10, 10])
    asked: list[int] = []

    def full(key: int) -> bool:
        asked.append(key)
        return key != 1

    assert batcher.next_batch(full) == [0]
    assert asked == [0, 1]
    batcher.complete([0])
    assert batcher.next_batch(lambda key: key != 1) == []
    assert batcher.first == 1
    assert batcher.next_batch(always) == [1, 2]


def test_a_full_queue_is_refused_with_a_retry_time() -> None:
    batcher = filled([1, 1], max_queue=2)
    with pytest.raises(EpdError) as caught:
        batcher.admit(2)
    assert caught.value.kind is ErrorKind.OVERLOADED
    assert caught.value.retry_after_s


def test_abort_tells_whether_the_picture_runs() -> None:
    batcher = filled([60, 60])
    batcher.next_batch(always)
    assert batcher.abort(0)
    assert not batcher.abort(1)
    batcher.complete([0])
    assert batcher.next_batch(always) == []


def test_prepared_after_abort_is_ignored() -> None:
    batcher = Batcher(100, 10)
    batcher.admit(0)
    batcher.abort(0)
    batcher.prepared(0, 5)
    assert batcher.first is None


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 150), max_size=20),
    aborted=st.sets(st.integers(0, 19)),
    refusals=st.lists(st.booleans(), max_size=60),
)
def test_every_picture_runs_once_in_order_whatever_refuses(
    sizes: list[int], aborted: set[int], refusals: list[bool]
) -> None:
    batcher = filled(sizes)
    for key in aborted & set(range(len(sizes))):
        batcher.abort(key)
    refuse = iter(refusals)
    ran: list[int] = []
    while batcher.waiting:
        batch = batcher.next_batch(lambda key: not next(refuse, False))
        batcher.check_integrity()
        assert len(batch) <= 1 or sum(sizes[key] for key in batch) <= 100
        ran += batch
        batcher.complete(batch)
    assert ran == [key for key in range(len(sizes)) if key not in aborted]
