"""Stop strings across token borders: nothing of one is ever let out.

Semantics, the same for every way of cutting the text into tokens: the output
ends before the stop string that is *complete* first, reading character by
character; of those complete at the same character, before the longest.

    text so far   ........................|.........
                  released: never looked  | held: might be the beginning
                  at again                | of a stop string
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scan:
    """What is known after some text, in characters from the output's beginning."""

    safe: int
    """Text before this belongs to no stop string, whatever follows."""
    match: int | None = None
    """Where a stop string begins, if one is complete; the output ends here."""


class StopFinder:
    """Finds stop strings in text that comes in pieces. One per output."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "empty stop strings are refused at the edge"
        self._stops = tuple(stops)
        self._held = ""
        self._safe = 0

    def feed(self, text: str) -> Scan:
        """Take more text. After a match nothing more is to be fed."""
        buffer = self._held + text
        match = self._first_match(buffer)
        if match is not None:
            return Scan(self._safe + match, self._safe + match)
        keep = self._open_suffix(buffer)
        self._held = buffer[len(buffer) - keep :]
        self._safe += len(buffer) - keep
        return Scan(self._safe)

    def _first_match(self, buffer: str) -> int | None:
        found = [
            (start + len(stop), start) for stop in self._stops if (start := buffer.find(stop)) >= 0
        ]
        return min(found)[1] if found else None

    def _open_suffix(self, buffer: str) -> int:
        """Length of the longest suffix that may become a stop string."""
        return max((_overlap(buffer, stop) for stop in self._stops), default=0)


def _overlap(buffer: str, stop: str) -> int:
    """Length of the longest suffix of `buffer` that is a proper prefix of `stop`."""
    for length in range(min(len(buffer), len(stop) - 1), 0, -1):
        if buffer.endswith(stop[:length]):
            return length
    return 0
