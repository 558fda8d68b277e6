"""Tests are right on slow and crowded machines: they wait for conditions, not for times."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
FILES = sorted(
    path.relative_to(TESTS)
    for folder in ("unit", "cases", "parity", "e2e", "contract")
    for path in (TESTS / folder).glob("*.py")
)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_INNER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def _straight(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run once, one after the other: not those of loops and hooks."""
    for statement in body:
        if isinstance(statement, (*_LOOPS, *_INNER)):
            continue
        yield statement
        for name in ("body", "orelse", "finalbody"):
            yield from _straight(getattr(statement, name, []))


def _sleeps(statement: ast.stmt) -> bool:
    """`await asyncio.sleep(0.1)` or `time.sleep(0.1)`; 0 is a turn of the loop, no time."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    call = call.value if isinstance(call, ast.Await) else call
    if not isinstance(call, ast.Call) or not ast.unparse(call.func).endswith(".sleep"):
        return False
    return ast.unparse(call.args[0]) != "0"


def unexplained(source: str) -> list[int]:
    """Lines of tests and fixtures that sleep and don't say why."""
    lines = source.splitlines()
    found = []
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            is_test = function.name.startswith("test_")
            if is_test or any("fixture" in ast.unparse(one) for one in function.decorator_list):
                found += [s.lineno for s in _straight(function.body) if _sleeps(s)]
    return [number for number in found if "  #" not in lines[number - 1]]


@pytest.mark.parametrize("path", FILES, ids=str)
def test_a_sleep_in_a_test_says_why_no_condition_would_do(path: Path) -> None:
    """`tests/waiting.py` has what is mostly meant: `until`, and `a_moment` for what must not
    happen. A fixed time before an assertion is too short on some machine."""
    assert unexplained((TESTS / path).read_text()) == []


def test_what_counts_as_unexplained() -> None:
    source = """
async def test_one():
    await asyncio.sleep(0.1)
    await asyncio.sleep(0)
    with some:
        time.sleep(1)
    time.sleep(2)  # longer than the bound that it outlasts
    while waiting:
        time.sleep(0.1)

    async def hook():
        await asyncio.sleep(1)

def helper():
    time.sleep(1)
"""
    assert unexplained(source) == [3, 6]
