"""Where one request's time went, as the gateway saw it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Phase:
    """Milliseconds from the gateway's receipt of the request; bytes moved, if any."""

    name: str
    start_ms: float
    duration_ms: float
    bytes: int = 0


class Timeline:
    """Phases of one request. They may overlap; one is listed when it has ended."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._zero = clock()
        self._open: dict[str, float] = {}
        self._phases: list[Phase] = []

    def begin(self, name: str) -> None:
        """Start a phase; one of that name that is still open starts anew."""
        self._open[name] = self._clock()

    def end(self, name: str, moved: int = 0, share_ms: float | None = None) -> None:
        """End a phase; nothing if it never began. `share_ms`: only its last so many
        milliseconds belong to it, as the stage measured."""
        start = self._open.pop(name, None)
        if start is None:
            return
        now = self._clock()
        if share_ms is not None:
            start = max(start, now - share_ms / 1e3)
        self._phases.append(Phase(name, (start - self._zero) * 1e3, (now - start) * 1e3, moved))

    @property
    def elapsed_s(self) -> float:
        """Since the gateway's receipt of the request."""
        return self._clock() - self._zero

    @property
    def phases(self) -> list[Phase]:
        """Ended phases in order of their start."""
        return sorted(self._phases, key=lambda phase: phase.start_ms)
