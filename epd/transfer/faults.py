"""Named places where a test can make things go wrong. Off in production.

``EPD_FAULTS`` is a comma-separated list of ``point[=value][:n/m]``:

    EPD_FAULTS="transfer.flip:1/3,transfer.delay=0.2"

``:n/m`` fires on the first n of every m passages (default: always); the counting
makes it deterministic. An unknown point is refused, so that a test with a typo
fails instead of passing.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache

from epd.errors import invalid

POINTS = {
    "transfer.refuse": "reader: the peer can't be reached",
    "transfer.fail": "reader: the engine reports a failed read",
    "transfer.drop": "reader: the read never ends (until its deadline)",
    "transfer.delay": "reader: wait this many seconds before reading",
    "transfer.flip": "reader: one byte of what arrived is inverted",
    "step.hang": "engine thread: a forward takes this many seconds more",
    "lease.stale": "owner: announces bytes whose content has since changed",
    "lease.wrong_rows": "owner: announces the rows of another item",
    "lease.short": "owner: announces one row, or block, too few",
    "lease.unregistered": "owner: announces memory that its engine does not give out",
}
"""Every fault point and what it does."""


@dataclass(slots=True)
class _Fault:
    value: float
    fires: int
    cycle: int
    passed: int = 0

    def passage(self) -> bool:
        hit = self.passed % self.cycle < self.fires
        self.passed += 1
        return hit


class Faults:
    """The fault points that are switched on in one process."""

    def __init__(self, spec: str = "") -> None:
        """
        Raises:
            EpdError: INVALID_REQUEST, an unknown point or a malformed entry.
        """
        self._on = dict(_parse(entry) for entry in spec.split(",") if entry.strip())

    def fires(self, point: str) -> bool:
        """Pass a point; true if the fault happens this time."""
        assert point in POINTS, point
        fault = self._on.get(point)
        return fault is not None and fault.passage()

    def value(self, point: str) -> float:
        """The number given with a point; 0 when it doesn't happen this time."""
        return self._on[point].value if self.fires(point) else 0.0


def flip_byte(address: int) -> None:
    """Invert the byte of host memory at `address`."""
    byte = ctypes.c_ubyte.from_address(address)
    byte.value ^= 0xFF


@cache
def from_environment() -> Faults:
    """The faults of this process, parsed once."""
    return Faults(os.environ.get("EPD_FAULTS", ""))


def _parse(entry: str) -> tuple[str, _Fault]:
    head, _, often = entry.strip().partition(":")
    point, _, value = head.partition("=")
    if point not in POINTS:
        raise invalid(f"EPD_FAULTS: no fault point {point!r}; there are: {', '.join(POINTS)}")
    try:
        fires, _, cycle = often.partition("/") if often else ("1", "/", "1")
        fault = _Fault(float(value or 0), int(fires), int(cycle))
    except ValueError as error:
        raise invalid(f"EPD_FAULTS: {entry!r} is not point[=value][:n/m]") from error
    if not 0 <= fault.fires <= fault.cycle or fault.cycle < 1:
        raise invalid(f"EPD_FAULTS: {entry!r}: n/m must be a fraction up to 1")
    return point, fault
