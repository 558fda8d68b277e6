"""Bytes that all requests in flight hold together: bodies, messages, fetched images.

Counted as they arrived. While a body is parsed there is up to as much again: its images
as text and as files.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from epd.errors import EpdError, ErrorKind


class Budget:
    """One per gateway. Not for several threads."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def hold(self) -> Hold:
        """What one request holds; nothing yet."""
        return Hold(self)


class Hold:
    """`take` as bytes arrive; `release` gives all back, once or more often. As a context
    manager it releases unless `keep` was called: then somebody else does."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._nbytes = 0
        self._kept = False

    def take(self, nbytes: int) -> None:
        """Count some more.

        Raises:
            EpdError: OVERLOADED, all requests together would hold too much.
        """
        budget = self._budget
        if budget.used + nbytes > budget.limit:
            raise EpdError(
                ErrorKind.OVERLOADED,
                f"the requests in flight hold {budget.used} bytes, {budget.limit} are allowed",
                retry_after_s=1.0,
            )
        budget.used += nbytes
        self._nbytes += nbytes

    def release(self) -> None:
        self._budget.used -= self._nbytes
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
