"""Bytes in flight: together no more than allowed, and no key takes the last ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.errors import EpdError, ErrorKind
from gateway.budget import GREED, Budget, Hold

LIMIT = 1000


def take_all(budget: Budget, key: str, piece: int = 10) -> list[Hold]:
    """Requests of one piece each until one is refused."""
    holds: list[Hold] = []
    while True:
        hold = budget.hold(key)
        try:
            hold.take(piece)
        except EpdError:
            return holds
        holds.append(hold)


def test_all_together_hold_no_more_than_allowed_and_give_back_all() -> None:
    budget = Budget(LIMIT)
    holds = take_all(budget, "one") + take_all(budget, "other")
    assert budget.used == LIMIT
    for hold in holds * 2:  # once or more often
        hold.release()
    assert budget.used == 0


def test_one_key_of_several_leaves_bytes_for_the_others() -> None:
    budget = Budget(LIMIT, several=True)
    take_all(budget, "greedy")
    assert budget.used == LIMIT * GREED // (GREED + 1)
    assert sum(1 for _ in take_all(budget, "modest")) >= LIMIT // 10 // (2 * GREED + 1)
    budget.hold("third").take(10)


def test_one_request_may_be_as_large_as_all() -> None:
    budget = Budget(LIMIT, several=True)
    hold = budget.hold("one")
    for _ in range(10):  # as its body arrives
        hold.take(LIMIT // 10)
    hold.release()
    budget.hold("one").take(LIMIT * 9 // 10)
    with pytest.raises(EpdError, match="this key") as caught:
        budget.hold("one").take(1)
    assert caught.value.kind is ErrorKind.OVERLOADED
    assert caught.value.retry_after_s


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, LIMIT), st.booleans()), max_size=60)
)
def test_what_is_counted_is_what_is_held(steps: list[tuple[str, int, bool]]) -> None:
    budget, held = Budget(LIMIT, several=True), list[tuple[Hold, int]]()
    for key, nbytes, leaves in steps:
        if leaves and held:
            held.pop(0)[0].release()
            continue
        hold = budget.hold(key)
        try:
            hold.take(nbytes)
        except EpdError:
            continue
        held.append((hold, nbytes))
    assert budget.used == sum(nbytes for _, nbytes in held) <= LIMIT
