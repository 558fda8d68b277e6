"""EPD_FAULTS: fires when and as often as it says, and refuses typos."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from epd.errors import EpdError
from epd.transfer.faults import POINTS, Faults, flip_byte


def test_nothing_fires_unless_asked() -> None:
    assert not any(Faults().fires(point) for point in POINTS)
    assert not any(Faults(" ").fires(point) for point in POINTS)


def test_a_fraction_fires_deterministically() -> None:
    faults = Faults("transfer.flip:1/3,transfer.drop")
    assert [faults.fires("transfer.flip") for _ in range(7)] == [True, False, False] * 2 + [True]
    assert all(faults.fires("transfer.drop") for _ in range(5))
    assert not faults.fires("transfer.fail")


def test_a_value_comes_only_when_the_fault_fires() -> None:
    faults = Faults("transfer.delay=0.5:1/2")
    assert [faults.value("transfer.delay") for _ in range(4)] == [0.5, 0.0, 0.5, 0.0]
    assert Faults().value("transfer.delay") == 0.0


@pytest.mark.parametrize(
    "spec",
    ["transfer.filp", "transfer.flip:2/1", "transfer.flip:1/0", "transfer.flip:x/3",
     "transfer.delay=soon", "transfer.flip:3"],
)  # fmt: skip
def test_typos_are_refused(spec: str) -> None:
    with pytest.raises(EpdError, match="EPD_FAULTS"):
        Faults(spec)


def test_asking_for_an_unknown_point_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        Faults().fires("transfer.unheard_of")


def test_flip_inverts_exactly_one_byte() -> None:
    memory = (ctypes.c_ubyte * 4)(1, 2, 3, 4)
    flip_byte(ctypes.addressof(memory) + 1)
    assert list(memory) == [1, 0xFD, 3, 4]


def test_every_declared_point_is_passed_by_the_code_and_no_other() -> None:
    root = Path(__file__).resolve().parents[2]
    passed = set()
    for package in ("epd", "encode", "prefill", "decode"):
        for path in (root / package).rglob("*.py"):
            calls = re.findall(r'\.(?:fires|value)\("([a-z._]+)"\)', path.read_text())
            passed |= {(package, point) for point in calls}
    assert {point for _, point in passed} == set(POINTS)
    owners = {package for package, point in passed if point.startswith("lease.")}
    assert owners == {"encode", "prefill"}, "decode announces nothing"
