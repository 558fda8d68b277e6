"""One worker as this gateway knows it: what it said of itself, what was heard since, and what
runs there. All of them: `gateway.workers`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from blake3 import blake3

from epd.errors import EpdError
from epd.jobs import Stage


class OpenStream(Protocol):
    """A call to a worker that can be given up, or asked back, from outside."""

    stage: Stage
    spoken: bool
    """It was asked something."""

    def lose(self, error: EpdError) -> None: ...
    def recall(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Capacity:
    kv_tokens: int = 0
    max_context: int = 0
    max_rows: int = 0
    max_queue: int = 0


@dataclass(frozen=True, slots=True)
class Card:
    """What a worker said of itself when it joined."""

    address: str
    epoch: int
    stages: frozenset[Stage]
    fingerprint: str
    dtype: str
    kv_layout: str = ""
    kv_block_shape: tuple[int, ...] = ()
    numerics_id: str = ""
    capacity: Capacity = Capacity()
    version: str = ""


@dataclass(slots=True, eq=False)
class Worker:
    """One life of one worker process, as this gateway knows it."""

    card: Card
    last_seen: float
    running: int = 0
    waiting: int = 0
    kv_tokens_free: int = 0
    steps: int = 0
    serving: bool = True
    draining: bool = False
    ends_at: float = 0.0
    """Of one that drains: when its grace is over, by the registry's clock."""
    suspect: bool = False
    gone: bool = False
    queued_rows: int = 0
    us_per_row: float = 0.0
    pending: int = 0
    """Streams that we opened since its last heartbeat."""
    pending_rows: int = 0
    """Of images that we sent since then, as far as it must encode them."""
    streams: set[OpenStream] = field(default_factory=set)

    @property
    def load(self) -> int:
        return self.running + self.waiting + self.pending

    @property
    def rows_ahead(self) -> int:
        return self.queued_rows + self.pending_rows

    @property
    def identity(self) -> bytes:
        """Stable over restarts, so that digests keep their worker."""
        return self.card.address.encode()

    @property
    def life(self) -> tuple[str, int]:
        return self.card.address, self.card.epoch

    @property
    def state(self) -> str:
        if self.gone:
            return "gone"
        if self.draining:
            return "draining"
        if self.suspect:
            return "suspect"
        return "live" if self.serving else "not serving"


def card_identity(card: Card) -> str:
    """Short name of one life of a worker, for logs."""
    return f"{card.address}#{blake3(card.epoch.to_bytes(8)).hexdigest(4)}"


def release(version: str) -> str:
    """What of a version decides whether two workers understand each other: before 1.0 the
    wire may change with the second number, then with the first."""
    major, _, rest = version.partition(".")
    return f"{major}.{rest.partition('.')[0]}" if major == "0" else major
