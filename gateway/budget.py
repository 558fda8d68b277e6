"""Bytes that all requests in flight hold together: bodies, messages, fetched images.

Counted as they arrived. While a body is parsed there is up to as much again: its images
as text and as files.

Where there are several keys, none takes the last bytes: beside one request it may hold
`GREED` times as many as are left (dynamic thresholds, Choudhury and Hahne 1998).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from types import TracebackType
from typing import Self

from epd.errors import EpdError, ErrorKind

GREED = 4


class Budget:
    """One per gateway. Not for several threads."""

    def __init__(self, limit: int, several: bool = False) -> None:
        """`several`: there is more than one key."""
        self.limit = limit
        self._several = several
        self._held: Counter[Hashable] = Counter()

    @property
    def used(self) -> int:
        return self._held.total()

    def hold(self, key: Hashable = b"") -> Hold:
        """What one request of this key holds; nothing yet."""
        return Hold(self, key)

    def take(self, key: Hashable, held: int, more: int) -> None:
        """Count `more` for a request that holds `held`.

        Raises:
            EpdError: OVERLOADED, all requests together, or this key's, would hold too much.
        """
        left = self.limit - self.used - more
        mine = self._held[key]
        greedy = self._several and mine > held and mine + more > GREED * left
        if left < 0:
            reason = f"the requests in flight hold {self.used} bytes, {self.limit} are allowed"
            raise EpdError(ErrorKind.OVERLOADED, reason, retry_after_s=1.0)
        if greedy:
            reason = f"this key's requests hold {mine} bytes, and {left + more} are left"
            raise EpdError(ErrorKind.OVERLOADED, reason, retry_after_s=1.0)
        self._held[key] += more

    def give_back(self, key: Hashable, nbytes: int) -> None:
        self._held[key] -= nbytes
        if not self._held[key]:
            del self._held[key]


class Hold:
    """`take` as bytes arrive; `release` gives all back, once or more often. As a context
    manager it releases unless `keep` was called: then somebody else does."""

    def __init__(self, budget: Budget, key: Hashable) -> None:
        self._budget = budget
        self._key = key
        self._nbytes = 0
        self._kept = False

    def take(self, nbytes: int) -> None:
        """Count some more.

        Raises:
            EpdError: see `Budget.take`.
        """
        self._budget.take(self._key, self._nbytes, nbytes)
        self._nbytes += nbytes

    def release(self) -> None:
        self._budget.give_back(self._key, self._nbytes)
        self._nbytes = 0

    def keep(self) -> None:
        self._kept = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None or not self._kept:
            self.release()
