"""Shares between clients."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from epd.fairness import FairQueue, Round, Shares, gives_way


def test_within_a_client_first_come_first_served_and_clients_take_turns() -> None:
    queue = FairQueue()
    for number in range(4):
        queue.add(number, "many")
    queue.add(4, "one")
    order = []
    while (key := queue.first()) is not None:
        queue.take(key, 10)
        order.append(key)
    assert order == [0, 4, 1, 2, 3]


def test_one_client_is_served_as_by_a_plain_queue() -> None:
    queue = FairQueue()
    for key in (5, 3, 9):
        queue.add(key, b"")
    queue.take(5, 100)
    assert queue.first() == 3
    queue.drop(3)
    assert queue.first() == 9
    queue.drop(9)
    queue.drop(77)  # never here
    assert queue.first() is None
    assert len(queue) == 0


def test_whoever_is_first_stays_first_until_it_has_what_it_waits_for() -> None:
    """A large request is not starved by small ones of clients that come later."""
    queue = FairQueue()
    queue.add(0, "large")
    queue.add(1, "before")
    queue.take(0, 1000)
    queue.add(2, "large")
    assert queue.first() == 1
    queue.take(1, 5)
    assert queue.first() == 2
    for key in range(3, 60):
        queue.add(key, f"newcomer {key}")
        assert queue.first() == 2


def test_a_round_serves_clients_in_turn_and_charges_nobody_for_what_it_skips() -> None:
    shares = Shares()
    wanted = ["a1", "a2", "a3", "b1", "b2"]
    turns = Round(shares, wanted, lambda name: name[0])
    order = []
    while (name := turns.first()) is not None:
        assert turns.first() == name, "first until it is served"
        if name == "a2":
            turns.skip()
            continue
        order.append(name)
        turns.take(1)
    assert order == ["a1", "b1", "a3", "b2"]
    assert Round(shares, ["b3", "a4"], lambda name: name[0]).first() == "b3", "level"
    assert Round(shares, [], str).first() is None


def test_in_a_full_queue_the_last_of_the_client_with_most_gives_way() -> None:
    queue = [("many", 0), ("few", 1), ("many", 2), ("many", 3)]
    assert gives_way(queue, "new") == 3
    assert gives_way(queue, "few") == 3
    assert gives_way(queue, "many") is None, "a client alone is refused as ever"
    assert gives_way([*queue, ("few", 4)], "few") is None, "it would have as many"
    assert gives_way([("a", 0), ("b", 1)], "c") is None, "all have one"
    assert gives_way([], "c") is None


def test_nobody_saves_up_turns_and_nobody_pays_for_having_been_alone() -> None:
    shares = Shares()
    for _ in range(100):
        shares.charge(shares.turn({"early": 0}), 10)
    given: Counter[str] = Counter()
    for _ in range(100):
        client = shares.turn({"early": 0, "late": 1})
        shares.charge(client, 10)
        given[client] += 10
    assert abs(given["early"] - given["late"]) <= 10


def test_it_forgets_clients_that_left() -> None:
    shares = Shares()
    for number in range(10_000):
        shares.charge(shares.turn({f"client {number}": number}), 1)
    assert len(shares) <= 1024


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=5), min_size=2, max_size=5),
    st.integers(10, 200),
)
def test_shares_of_those_that_always_want_more_differ_by_one_grant(
    costs: list[list[int]], rounds: int
) -> None:
    """Whatever a client's grants cost."""
    shares = Shares()
    wanting = {client: client for client in range(len(costs))}
    given, grants = Counter(dict.fromkeys(wanting, 0)), Counter(dict.fromkeys(wanting, 0))
    for _ in range(rounds):
        client = shares.turn(wanting)
        cost = costs[client][grants[client] % len(costs[client])]
        shares.charge(client, cost)
        given[client] += cost
        grants[client] += 1
        assert max(given.values()) - min(given.values()) <= max(map(max, costs))
