"""How many tokens a step may have so that it takes about as long as it should.

A step can't be interrupted: its length is how long a cancelled request goes on, and
how long a short prompt waits behind a long one. Pure: no clock, no torch.
"""

from __future__ import annotations

from typing import Final

_GRAIN: Final = 16
_FIRST: Final = 128
_WEIGHT: Final = 0.5
"""Of the newest step in the running mean: contexts grow, so costs drift."""


class StepBudget:
    """Follows the measured cost of a token; never above `most` tokens.

    `target_ms` 0 means: always `most`.
    """

    def __init__(self, most: int, target_ms: float) -> None:
        self._most = most
        self._target_ms = target_ms
        self._ms_per_token: float | None = None

    @property
    def tokens(self) -> int:
        """For the next step; at least one grain (or `most`), so that work goes on."""
        if not self._target_ms:
            return self._most
        if self._ms_per_token is None:
            return min(self._most, _FIRST)
        fit = int(self._target_ms / self._ms_per_token)
        return min(self._most, max(_GRAIN, fit // _GRAIN * _GRAIN))

    def observe(self, tokens: int, ms: float) -> None:
        """A step of `tokens` took `ms`. Small ones are mostly overhead: they would
        make a token look dear, so they don't count."""
        if tokens < _GRAIN:
            return
        cost = max(ms, 1e-3) / tokens
        known = self._ms_per_token
        self._ms_per_token = cost if known is None else known + _WEIGHT * (cost - known)
