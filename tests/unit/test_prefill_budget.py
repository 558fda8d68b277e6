"""The step budget against synthetic costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill.budget import StepBudget


def settled(most: int, ms_per_token: float, overhead_ms: float = 0.0) -> StepBudget:
    budget = StepBudget(most, 250)
    for _ in range(20):
        tokens = budget.tokens()
        budget.observe(tokens, overhead_ms + tokens * ms_per_token)
    return budget


@pytest.mark.parametrize(("cost", "expected"), [(5.0, 48), (2.0, 112), (0.01, 512), (100.0, 16)])
def test_a_step_takes_about_its_target(cost: float, expected: int) -> None:
    assert settled(512, cost).tokens() == expected


def test_it_recovers_when_tokens_become_cheap_again() -> None:
    budget = settled(512, 5.0)
    for _ in range(20):
        budget.observe(budget.tokens(), budget.tokens() * 0.1)
    assert budget.tokens() == 512


def test_small_steps_say_nothing_about_the_cost_of_a_token() -> None:
    budget = settled(512, 1.0)
    before = budget.tokens()
    for _ in range(20):
        budget.observe(1, 50.0)
    assert budget.tokens() == before


def test_without_a_target_it_is_the_most() -> None:
    budget = StepBudget(512, 0)
    budget.observe(512, 10_000)
    assert budget.tokens() == 512


@given(
    st.integers(1, 4096),
    st.lists(st.tuples(st.integers(1, 4096), st.floats(0, 1e6)), max_size=30),
)
def test_there_is_always_a_budget_and_never_too_much(
    most: int, steps: list[tuple[int, float]]
) -> None:
    budget = StepBudget(most, 250)
    for tokens, ms in steps:
        budget.observe(tokens, ms)
        assert 1 <= budget.tokens() <= most


def test_alone_a_step_may_take_longer() -> None:
    budget = StepBudget(512, 250, 1000)
    assert budget.tokens(alone=True) == budget.tokens() == 128, "nothing is known of the cost"
    for _ in range(20):
        budget.observe(100, 250)
    assert (budget.tokens(), budget.tokens(alone=True)) == (96, 400)
    for _ in range(20):
        budget.observe(100, 100)
    assert (budget.tokens(), budget.tokens(alone=True)) == (240, 512)


def test_alone_it_never_takes_shorter_steps() -> None:
    budget = StepBudget(512, 1000, 250)
    budget.observe(100, 250)
    assert budget.tokens(alone=True) == budget.tokens() == 400
