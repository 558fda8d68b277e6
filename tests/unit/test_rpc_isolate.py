"""A batch that raises: who is at fault fails, the others don't."""

from __future__ import annotations

from collections.abc import Sequence

from epd.errors import EpdError, ErrorKind
from epd.runtime.isolate import run_isolated


def halves(batch: Sequence[int]) -> list[float]:
    return [10 / number for number in batch]


def test_a_good_batch_runs_once() -> None:
    calls: list[Sequence[int]] = []

    def counted(batch: Sequence[int]) -> list[float]:
        calls.append(batch)
        return halves(batch)

    assert run_isolated(counted, [1, 2], str, "decode") == [10, 5]
    assert len(calls) == 1


def test_the_one_at_fault_fails_with_its_name_and_the_others_get_their_results() -> None:
    first, bad, last = run_isolated(halves, [1, 0, 5], lambda n: f"req-{n}", "decode")
    assert (first, last) == (10, 2)
    assert isinstance(bad, EpdError)
    assert bad.kind is ErrorKind.INTERNAL
    assert "req-0" in bad.message


def test_a_typed_error_stays_typed() -> None:
    def refuse(batch: Sequence[int]) -> list[int]:
        raise EpdError(ErrorKind.INVALID_IMAGE, "no")

    (error,) = run_isolated(refuse, [1], str, "decode")
    assert isinstance(error, EpdError)
    assert error.kind is ErrorKind.INVALID_IMAGE


def test_nobody_runs_more_than_twice() -> None:
    runs = dict.fromkeys(range(4), 0)

    def always_bad(batch: Sequence[int]) -> list[int]:
        for number in batch:
            runs[number] += 1
        raise ValueError

    results = run_isolated(always_bad, range(4), str, "decode")
    assert all(isinstance(result, EpdError) for result in results)
    assert set(runs.values()) == {2}
