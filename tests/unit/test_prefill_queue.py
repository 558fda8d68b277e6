"""Who waits for prefill's memory: how many, in what order, and who gives way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.errors import EpdError, ErrorKind
from prefill.scheduler import Scheduler


def always(key: int) -> int:
    """Room for everybody; nothing is cached."""
    return 0


def test_reservation_is_in_order_of_arrival_without_overtaking() -> None:
    scheduler = Scheduler(10, 10, 10)
    for key in range(3):
        scheduler.admit(key, 5)
    asked: list[int] = []

    def full(key: int) -> int | None:
        asked.append(key)
        return 0 if key == 0 else None

    assert scheduler.reserve(full) == [0]
    assert asked == [0, 1]
    assert scheduler.waiting == 2
    assert scheduler.reserve(always) == [1, 2]


def test_a_full_queue_is_refused() -> None:
    scheduler = Scheduler(10, 10, max_queue=1)
    scheduler.admit(0, 5)
    with pytest.raises(EpdError) as caught:
        scheduler.admit(1, 5)
    assert caught.value.kind is ErrorKind.OVERLOADED


def test_the_queue_is_bounded_in_tokens_too() -> None:
    scheduler = Scheduler(10, 10, max_queue=100, max_queue_tokens=50)
    scheduler.admit(0, 80)  # alone, it may be as long as it likes
    with pytest.raises(EpdError) as caught:
        scheduler.admit(1, 1)
    assert caught.value.kind is ErrorKind.OVERLOADED
    assert "80 tokens wait" in caught.value.message
    scheduler.abort(0)
    scheduler.admit(1, 25)
    scheduler.admit(2, 25)
    with pytest.raises(EpdError):
        scheduler.admit(3, 1)
    assert scheduler.reserve(lambda key: 0 if key == 1 else None) == [1]
    scheduler.admit(4, 25)
    scheduler.check_integrity()


def test_a_flood_does_not_keep_others_out_of_a_full_queue() -> None:
    scheduler = Scheduler(10, 10, max_queue=4, max_queue_tokens=100)
    for key in range(4):
        scheduler.admit(key, 20, client=b"flood")
    assert scheduler.make_room(b"flood", 1) == []
    assert scheduler.make_room(b"one", 20) == [3]
    assert scheduler.make_room(b"one", 55) == [3, 2], "as many as it takes, in tokens too"
    assert scheduler.make_room(b"one", 90) == [], "nobody leaves for who wouldn't fit either"
    for key in scheduler.make_room(b"one", 20):
        scheduler.abort(key)
    scheduler.admit(4, 20, client=b"one")
    assert scheduler.make_room(b"one", 5) == scheduler.make_room(b"two", 5) == [2]
    scheduler.abort(2)
    scheduler.admit(5, 20, client=b"one")
    assert scheduler.make_room(b"one", 5) == [], "half of it is its own"
    assert scheduler.make_room(b"two", 5) == [1]
    scheduler.check_integrity()


def test_no_full_queue_refuses_an_answer_that_has_begun() -> None:
    """It counts in none either, and gives its place to nobody."""
    scheduler = Scheduler(10, 10, max_queue=2, max_queue_tokens=50)
    for key in range(2):
        scheduler.admit(key, 25, client=b"flood")
    scheduler.admit(2, 25, client=b"flood", resumed=True)
    scheduler.admit(3, 25, client=b"flood", resumed=True)
    with pytest.raises(EpdError, match="2 requests wait"):
        scheduler.admit(4, 1, client=b"flood")
    assert scheduler.make_room(b"one", 5) == [1]
    scheduler.abort(1)
    scheduler.admit(5, 25, client=b"one")
    assert scheduler.reserve(lambda key: 0) == [0, 5, 2, 3]
    scheduler.check_integrity()


def room_for(count: int) -> Callable[[int], int | None]:
    """Memory of so many requests."""
    left = iter([0] * count)

    def reserve(key: int) -> int | None:
        return next(left, None)

    return reserve


class Unread(dict[int, Any]):
    """Nobody goes through it."""

    def __iter__(self) -> Any:
        raise AssertionError

    values = items = keys = __iter__


def test_who_comes_does_not_go_through_the_queue() -> None:
    """Which may be long when many come: each would pay for all before it."""
    scheduler = Scheduler(10, 10, max_queue=9)
    scheduler.admit(0, 5)
    scheduler._waiting = Unread(scheduler._waiting)
    assert scheduler.make_room(b"one", 5) == []
    scheduler.admit(1, 5)
    scheduler.abort(0)
    assert scheduler.queued_tokens == 5


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["admit", "admit", "resume", "abort", "reserve", "step"]),
            st.integers(0, 30),
        ),
        max_size=60,
    )
)
def test_what_waits_is_counted_as_it_comes_and_goes(moves: list[tuple[str, int]]) -> None:
    """`check_integrity` counts it anew. Requests are refused, give way and leave on the way."""
    scheduler = Scheduler(8, 4, max_queue=6, max_queue_tokens=60)
    for key, (move, number) in enumerate(moves):
        client = bytes([number % 3])
        if move == "admit":
            for leaving in scheduler.make_room(client, number + 1):
                scheduler.abort(leaving)
            with suppress(EpdError):
                scheduler.admit(key, number + 1, client=client)
        elif move == "resume":
            scheduler.admit(key, number + 1, client=client, resumed=True)
        elif move == "abort":
            scheduler.abort(key - number)
        elif move == "reserve":
            scheduler.reserve(room_for(number % 4))
        else:
            for chunk in scheduler.next_batch():
                scheduler.complete(chunk)
        scheduler.check_integrity()


def test_the_queue_for_memory_takes_clients_in_turn() -> None:
    scheduler = Scheduler(10, 10, 100)
    for key in range(5):
        scheduler.admit(key, 10, client=b"flood")
    scheduler.admit(5, 10, client=b"one")
    room = iter([0, 0, 0])
    assert scheduler.reserve(lambda key: next(room, None)) == [0, 5, 1]
    scheduler.abort(2)
    assert scheduler.reserve(always) == [3, 4]
    scheduler.check_integrity()
