"""Until when a request may take, and whose wish that is."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from epd.errors import EpdError, ErrorKind


@dataclass(frozen=True, slots=True)
class Deadline:
    """Of one request."""

    at: float
    """On the event loop's clock."""
    clients: bool = False
    """Its client's own, sooner than the gateway's."""

    @classmethod
    def of(cls, longest_s: float, asked_s: float | None = None) -> Deadline:
        """From now: the gateway's `longest_s`, or what the client asked for if that is less."""
        now = asyncio.get_running_loop().time()
        if asked_s is None or asked_s >= longest_s:
            return cls(now + longest_s)
        return cls(now + asked_s, clients=True)

    def passed(self) -> EpdError:
        """What to raise then."""
        reason = "the request's deadline has passed"
        return EpdError(ErrorKind.DEADLINE_EXCEEDED, reason, by_client=self.clients)
