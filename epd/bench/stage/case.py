"""Things that are timed side by side, and what one says about the other. Pure but for
the clocks."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Case:
    """Something that is run once a round."""

    name: str
    run: Callable[[], object]
    work: float = 0.0
    """Floating-point operations or bytes of one run; 0: time alone counts."""
    unit: str = ""
    """Of `work` a second: "Gflop/s" or "GB/s"."""
    base: Case | None = None
    """What it is compared with."""
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    """Of this process: s."""

    def once(self) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        self.run()
        self.cpu.append(time.process_time() - cpu)
        self.wall.append(time.perf_counter() - wall)

    def ratio(self, pick: Callable[[Sequence[float]], float], clock: str = "wall") -> float | None:
        """With work on both sides: this case's rate over that of its base (1 is as fast).
        Else its time over that of its base (1 is at the floor)."""
        if self.base is None:
            return None
        own, base = pick(getattr(self, clock)), pick(getattr(self.base, clock))
        if self.work and self.base.work:
            return (self.work / own) / (self.base.work / base)
        return own / base


def interleave(
    cases: Sequence[Case], rounds: int, rng: random.Random, pause_s: float = 0.0
) -> None:
    """Each case once to warm up, then once a round in random order: drift of the machine
    and other work on it hit all alike. Before each run it waits for `pause_s`."""
    for case in cases:
        case.run()
    for _ in range(rounds):
        for case in rng.sample(cases, len(cases)):
            time.sleep(pause_s)
            case.once()


def row(case: Case) -> dict[str, Any]:
    """For JSON: medians, minima, ratios."""
    found: dict[str, Any] = {
        "case": case.name,
        "median_ms": statistics.median(case.wall) * 1e3,
        "min_ms": min(case.wall) * 1e3,
        "cpu_median_ms": statistics.median(case.cpu) * 1e3,
        "to": case.base.name if case.base else "",
        "is": "share of its rate" if case.base and case.work and case.base.work else "times",
        "ratio": case.ratio(statistics.median),
        "ratio_of_minima": case.ratio(min),
        "ratio_of_cpu": case.ratio(statistics.median, "cpu"),
    }
    if case.work:
        found["rate"] = case.work / statistics.median(case.wall) / 1e9
        found["unit"] = case.unit
    return found


HEAD = ("case", "median ms", "least ms", "CPU ms", "rate", "ratio", "of minima", "of CPU time")


def cells(found: dict[str, Any]) -> list[str]:
    """A row of `HEAD`."""
    rate = f"{found['rate']:.1f} {found['unit']}" if "rate" in found else ""
    times = [f"{found[name]:.3g}" for name in ("median_ms", "min_ms", "cpu_median_ms")]
    ratios = [found[name] for name in ("ratio", "ratio_of_minima", "ratio_of_cpu")]
    said = ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
    if said[0]:
        share = found["is"] != "times"
        said[0] += f" of {found['to']}" if share else f" x {found['to']}"
    return [found["case"], *times, rate, *said]
