"""How requests ended, counted and kept for the times between."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

WRONG, HUNG, UNTYPED = "wrong", "hung", "untyped"
NEVER = (WRONG, HUNG, UNTYPED, "internal_error", "checksum_mismatch", "contract_mismatch")
"""None of these may happen, whatever is hurt."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """`kind`: "right", a typed error's code, "aborted", "gateway lost", or one of `NEVER`."""

    question: str
    how: str
    started: float
    ended: float
    kind: str
    detail: str = ""


@dataclass(slots=True)
class Outcomes:
    """Of one run."""

    all: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.all.append(outcome)

    @property
    def counts(self) -> Counter[str]:
        return Counter(outcome.kind for outcome in self.all)

    @property
    def faults(self) -> list[Outcome]:
        return [outcome for outcome in self.all if outcome.kind in NEVER]

    def recovery_s(self, since: float) -> float | None:
        """From an injury to the end of the first right answer that was asked for after it."""
        ends = [o.ended for o in self.all if o.kind == "right" and o.started >= since]
        return min(ends) - since if ends else None

    @property
    def longest_silence_s(self) -> float:
        """Between two right answers."""
        ends = sorted(outcome.ended for outcome in self.all if outcome.kind == "right")
        return max((b - a for a, b in pairwise(ends)), default=0.0)
