"""How many tokens a step may have so that it takes about as long as it should.

A step can't be interrupted: its length is how long a cancelled request goes on, how long
a short prompt waits behind a long one, and, where decode is in the same process, how long
running answers wait. While there is one request and nothing else, only the first counts:
then larger steps are better, which cost less a token. Pure: no clock, no torch.
"""

from __future__ import annotations

from typing import Final

_GRAIN: Final = 16
_FIRST: Final = 128
_WEIGHT: Final = 0.5
"""Of the newest step in the running mean: contexts grow, so costs drift."""


class StepBudget:
    """Follows the measured cost of a token; never above `most` tokens.

    `target_ms` 0 means: always `most`. `lone_ms` is the target of a step that nobody waits
    for; it counts where it is the larger one.
    """

    def __init__(self, most: int, target_ms: float, lone_ms: float = 0.0) -> None:
        self._most = most
        self._target_ms = target_ms
        self._lone_ms = max(lone_ms, target_ms)
        self._ms_per_token: float | None = None

    def tokens(self, *, alone: bool = False) -> int:
        """For the next step; at least one grain (or `most`), so that work goes on. `alone`:
        nobody waits for its end but the one request that it is for."""
        if not self._target_ms:
            return self._most
        if self._ms_per_token is None:
            return min(self._most, _FIRST)
        fit = int((self._lone_ms if alone else self._target_ms) / self._ms_per_token)
        return min(self._most, max(_GRAIN, fit // _GRAIN * _GRAIN))

    def ms(self, tokens: int) -> float:
        """What so many tokens take, as measured; 0 before the first step."""
        return tokens * (self._ms_per_token or 0.0)

    def observe(self, tokens: int, ms: float) -> None:
        """A step of `tokens` took `ms`. Small ones are mostly overhead: they would
        make a token look dear, so they don't count."""
        if tokens < _GRAIN:
            return
        cost = max(ms, 1e-3) / tokens
        known = self._ms_per_token
        self._ms_per_token = cost if known is None else known + _WEIGHT * (cost - known)
