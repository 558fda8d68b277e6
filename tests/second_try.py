"""Every test that passes fails once, for `--reruns 1` to try it again: with the services, and
the caches in them, that its first try has left. CI gives second tries, and one that can't
succeed is none.

    make test PYTEST_ARGS="-p tests.second_try --reruns 1"
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

_tried: set[str] = set()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    yield
    if item.nodeid not in _tried:
        _tried.add(item.nodeid)
        raise AssertionError("passed, and is tried again")
