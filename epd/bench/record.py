"""What one request showed to its client."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Record:
    """One request. Times are seconds on the event loop's clock.

    Latencies start at `scheduled`: with arrivals of their own (rate, trace) that is when the
    request should have been sent, so that a client or server that falls behind can't hide it
    ("coordinated omission"). With fixed concurrency it is when the request was sent.
    """

    target: str
    """Set by whoever sends: which server, which load, which round, which request of it."""
    level: str
    round: int
    index: int
    kind: str
    """Class of request in a mixed workload; "" where there is one class."""
    asked_tokens: int
    images: int
    scheduled: float
    sent: float = 0.0

    arrivals: list[float] = field(default_factory=list)
    """Set by the client: when each event with new tokens came."""
    ended: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    """From `usage`; where a server sends none, the number of events."""
    error: str = ""
    """Its kind ("http_503", "timeout", ...); "" is success."""
    detail: str = ""
    phases: dict[str, float] = field(default_factory=dict)
    """ms by name, summed over images: where the server says so (`timeline`)."""
    spans: dict[str, tuple[float, float]] = field(default_factory=dict)
    """(start, end) of each phase, each image's its own, ms after the server's receipt."""
    moved: dict[str, int] = field(default_factory=dict)
    """Bytes by name, as above."""

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def ttft(self) -> float:
        """Time to the first token, s. Needs `ok`."""
        return self.arrivals[0] - self.scheduled

    @property
    def latency(self) -> float:
        """End to end, s."""
        return self.ended - self.scheduled

    @property
    def lag(self) -> float:
        """How late the client was, s."""
        return self.sent - self.scheduled

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, s; None for one token."""
        if self.output_tokens < 2 or len(self.arrivals) < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Between one event with tokens and the next, s: what a reader sees. A server that
        sends several tokens an event has fewer and longer ones."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]

    def row(self, origin: float) -> dict[str, Any]:
        """For JSON; absolute times become seconds after `origin`."""
        row = asdict(self)
        for key in ("scheduled", "sent", "ended"):
            row[key] = round(row[key] - origin, 6)
        row["arrivals"] = [round(t - origin, 6) for t in self.arrivals]
        return row
