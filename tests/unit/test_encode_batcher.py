"""Encode's batcher against synthetic pictures."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encode.batcher import Batcher, Limits
from epd.errors import EpdError, ErrorKind


def always(key: int) -> bool:
    return True


def never(key: int) -> bool:
    return False


def made(budget: int = 100, max_queue: int = 100, decoding: int = 4, ahead: int = 32) -> Batcher:
    return Batcher(Limits(budget, max_queue, decoding, ahead))


def decode(batcher: Batcher, patches: dict[int, int]) -> list[int]:
    """All pictures that may be, at once; returns their order."""
    order: list[int] = []
    while keys := batcher.next_pictures():
        order += keys
        for key in keys:
            batcher.decoded(key, patches[key])
    return order


def filled(patches: list[int], budget: int = 100, max_queue: int = 100) -> Batcher:
    batcher = made(budget, max_queue)
    for key in range(len(patches)):
        batcher.admit(key)
    decode(batcher, dict(enumerate(patches)))
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
    decode(batcher, {1: 10})
    assert batcher.next_batch(always) == []
    batcher.complete([0])
    assert batcher.next_batch(always) == [1]


def test_a_picture_that_is_not_decoded_yet_does_not_hold_up_others() -> None:
    batcher = made()
    batcher.admit(0)
    batcher.admit(1)
    assert batcher.next_pictures() == [0, 1]
    batcher.decoded(1, 10)
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


def test_decoded_after_abort_is_ignored() -> None:
    batcher = made()
    batcher.admit(0)
    assert batcher.next_pictures() == [0]
    batcher.abort(0)
    batcher.decoded(0, 5)
    assert batcher.first is None


def test_few_are_decoded_at_a_time_and_not_far_ahead() -> None:
    batcher = made(decoding=2, ahead=4)
    for key in range(6):
        batcher.admit(key)
    assert batcher.next_pictures() == [0, 1]
    assert batcher.next_pictures() == []
    batcher.decoded(1, 60)
    assert batcher.next_pictures() == [2]
    batcher.decoded(0, 60)
    batcher.decoded(2, 60)
    assert batcher.next_pictures() == [3], "four are decoded, or will be"
    assert batcher.next_batch(always) == [0]
    assert batcher.next_pictures() == [], "one that runs has its pixels still"
    batcher.complete([0])
    assert batcher.next_pictures() == [4]
    batcher.abort(4)
    assert batcher.next_pictures() == [5]
    batcher.check_integrity()


def test_a_requests_first_picture_is_decoded_alone() -> None:
    batcher = made()
    for key in range(3):
        batcher.admit(key, request="a")
    batcher.admit(3, request="b")
    batcher.admit(4, request="a", client=b"who chose the same name")
    assert sorted(batcher.next_pictures()) == [0, 3, 4]
    assert batcher.next_pictures() == []
    batcher.decoded(0, 1)
    assert batcher.next_pictures() == [1, 2], "then the others side by side"


def test_if_a_requests_first_picture_leaves_nobody_waits_for_it() -> None:
    batcher = made()
    for key in range(3):
        batcher.admit(key, request="a")
    assert batcher.next_pictures() == [0]
    batcher.abort(0)
    assert batcher.next_pictures() == [1, 2]


def test_one_clients_burst_does_not_hold_up_another_ones_picture() -> None:
    """200 pictures of one wait; what comes then is decoded and encoded next."""
    batcher = made(budget=100, max_queue=256)
    for key in range(200):
        batcher.admit(key, client=b"burst")
    patches = dict.fromkeys(range(202), 50)
    before = decode(batcher, patches)
    assert before == list(range(26)), "so many are decoded ahead; a few places are left"
    assert batcher.next_batch(always) == [0, 1]
    batcher.admit(200, client=b"one")
    batcher.admit(201, client=b"one")
    assert set(decode(batcher, patches)) == {200, 201}
    batcher.complete([0, 1])
    assert 200 in batcher.next_batch(always)
    batcher.complete(batcher._running)
    assert 201 in batcher.next_batch(always)


def test_a_burst_does_not_keep_others_out_of_a_full_queue() -> None:
    batcher = made(max_queue=4, decoding=1)
    for key in range(4):
        assert batcher.make_room(b"burst") == []
        batcher.admit(key, client=b"burst")
    assert batcher.next_pictures() == [0]
    assert batcher.make_room(b"burst") == []
    for key in (10, 11):
        if leaving := batcher.make_room(b"one"):
            batcher.abort(*leaving)
            batcher.admit(key, client=b"one")
    assert sorted(batcher._waiting) == [0, 1, 2, 10], "what is being decoded stays"


def full_of_bytes() -> Batcher:
    """Four files of 25 of one client, where 100 bytes may wait; the first is being decoded."""
    batcher = Batcher(Limits(100, 100, decoding=1, max_file_bytes=100))
    for key in range(4):
        batcher.admit(key, client=b"burst", file_bytes=25)
    assert batcher.next_pictures() == [0]
    return batcher


def test_files_that_wait_are_bounded_in_bytes_too() -> None:
    batcher = full_of_bytes()
    with pytest.raises(EpdError, match=r"encode\.max_queue_mib") as caught:
        batcher.admit(4, file_bytes=1)
    assert caught.value.kind is ErrorKind.OVERLOADED
    batcher.decoded(0, 10)  # pixels now, which are counted otherwise
    batcher.admit(4, file_bytes=25)


def test_one_file_may_wait_however_large_it_is() -> None:
    batcher = Batcher(Limits(100, 100, max_file_bytes=100))
    batcher.admit(0, file_bytes=101)
    with pytest.raises(EpdError):
        batcher.admit(1, file_bytes=1)


def test_a_burst_of_large_files_does_not_keep_others_out() -> None:
    batcher = full_of_bytes()
    assert batcher.make_room(b"burst", 25) == []
    assert batcher.make_room(b"one", 25) == [3]
    assert batcher.make_room(b"one", 50) == [3, 2], "as many as it takes"
    assert batcher.make_room(b"one", 100) == [], "nobody leaves for who wouldn't fit either"
    batcher.abort(3)
    batcher.admit(10, client=b"one", file_bytes=25)
    assert batcher.make_room(b"one", 25) == [], "it would have as many then"


class Unread(dict[int, Any]):
    """Nobody goes through it."""

    def __iter__(self) -> Any:
        raise AssertionError

    values = items = keys = __iter__


def test_who_comes_does_not_go_through_the_queue() -> None:
    """Which may be long when many come: each would pay for all before it."""
    batcher = Batcher(Limits(100, 100, max_file_bytes=100))
    batcher.admit(0, file_bytes=25)
    batcher._waiting = Unread(batcher._waiting)
    assert batcher.make_room(b"one", 25) == []
    assert batcher.admit(1, file_bytes=25) == 1
    batcher.abort(0)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["admit", "admit", "abort", "decode", "decoded", "run", "complete"]),
            st.integers(0, 30),
        ),
        max_size=60,
    )
)
def test_the_bytes_that_wait_are_counted_as_they_come_and_go(moves: list[tuple[str, int]]) -> None:
    """`check_integrity` counts them anew. Files are refused, give way and leave on the way."""
    batcher = Batcher(Limits(20, 6, decoding=2, ahead=4, max_file_bytes=60))
    decoding: list[int] = []
    batch: list[int] = []
    for key, (move, number) in enumerate(moves):
        client = bytes([number % 3])
        if move == "admit":
            for leaving in batcher.make_room(client, number):
                batcher.abort(leaving)
            with suppress(EpdError):
                batcher.admit(key, client=client, request=f"{number % 2}", file_bytes=number)
        elif move == "abort":
            batcher.abort(key - number)
        elif move == "decode":
            decoding += batcher.next_pictures()
        elif move == "decoded" and decoding:
            batcher.decoded(decoding.pop(number % len(decoding)), 1 + number)
        elif move == "run":
            batch = batcher.next_batch(always if number % 4 else never) or batch
        elif move == "complete":
            batcher.complete(batch)
            batch = []
        batcher.check_integrity()


def test_shares_go_by_patches_not_by_pictures() -> None:
    batcher = made(budget=400, max_queue=200, decoding=200, ahead=1000)
    patches = {key: 10 if key % 5 else 40 for key in range(150)}
    for key, count in patches.items():
        batcher.admit(key, client=b"large" if count == 40 else b"small", rows=count)
    decode(batcher, patches)
    for _ in range(3):
        batch = batcher.next_batch(always)
        given = Counter({10: 0, 40: 0})
        for key in batch:
            given[patches[key]] += patches[key]
        assert abs(given[10] - given[40]) <= 40
        batcher.complete(batch)


def test_the_first_that_finds_no_place_stays_first_whoever_comes() -> None:
    batcher = made(ahead=100, max_queue=1000)
    batcher.admit(0, client=b"large")
    decode(batcher, {0: 90})
    assert batcher.next_batch(lambda _: False) == []
    asked: list[int] = []

    def no_place(key: int) -> bool:
        asked.append(key)
        return False

    for key in range(1, 50):
        batcher.admit(key, client=bytes([key]))
        decode(batcher, {key: 1})
        assert batcher.next_batch(no_place) == []
    assert asked == [0] * 49
    assert batcher.next_batch(always)[0] == 0


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 120)), min_size=1, max_size=40),
    st.sets(st.integers(0, 39)),
    st.integers(1, 6),
)
def test_whatever_clients_want_every_picture_runs_and_in_its_clients_order(
    wanted: list[tuple[int, int]], aborted: set[int], ahead: int
) -> None:
    batcher = made(decoding=2, ahead=ahead)
    for key, (client, patches) in enumerate(wanted):
        batcher.admit(key, client=bytes([client]), rows=patches)
    ran: list[int] = []
    for left in range(2 * len(wanted), 0, -1):
        decode(batcher, {key: patches for key, (_, patches) in enumerate(wanted)})
        if left in aborted:
            batcher.abort(left)
        batch = batcher.next_batch(always)
        batcher.check_integrity()
        ran += batch
        batcher.complete(batch)
    assert batcher.waiting == 0, "somebody starves"
    assert len(ran) == len(set(ran))
    assert set(range(len(wanted))) - set(ran) <= aborted
    for client in range(4):
        own = [key for key in ran if wanted[key][0] == client]
        assert own == sorted(own)


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
