"""A futex in a file: who rings wakes who sleeps, in any process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from epd.runtime.bell import Bell
from tests.waiting import soon

NEVER_S = 1000.0
SHORT_S = 0.01


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    file = os.open(tmp_path / "bell", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, 12)
    yield file
    os.close(file)


@pytest.fixture
def bell(file: int) -> Iterator[Bell]:
    bell = Bell(file, 8)
    yield bell
    bell.close()


def test_a_ring_wakes_all_who_sleep(bell: Bell, file: int) -> None:
    other = Bell(file, 8)  # mapped elsewhere, as in another process
    with ThreadPoolExecutor(2) as pool, soon(30.0, "the end of its sleep"):
        asleep = [pool.submit(each.hear, each.state(), NEVER_S) for each in (bell, other)]
        while not all(one.done() for one in asleep):  # whoever wasn't asleep yet is called again
            bell.ring()
    other.close()


def test_a_ring_before_the_sleep_is_not_missed(bell: Bell) -> None:
    with soon(30.0, "the end of its sleep"):
        for _ in range(100):
            state = bell.state()
            bell.ring()
            bell.hear(state, NEVER_S)


def test_nobody_rings(bell: Bell) -> None:
    bell.hear(bell.state(), SHORT_S)
    bell.hear(bell.state(), -1.0)


@pytest.mark.parametrize("length", [0, 10])
def test_a_file_that_was_cut_short_is_no_fault(bell: Bell, file: int, length: int) -> None:
    os.ftruncate(file, length)
    bell.hear(bell.state(), SHORT_S)
    bell.ring()
    assert os.fstat(file).st_size == 12


def test_a_file_too_short_from_the_start(file: int) -> None:
    os.ftruncate(file, 0)
    with pytest.raises(ValueError, match="length"):
        Bell(file, 8)


def test_without_a_futex_sleeps_are_short(bell: Bell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epd.runtime.bell._CALL", None)
    with soon(30.0, "the end of its sleep"):
        bell.hear(bell.state(), NEVER_S)
    bell.ring()
