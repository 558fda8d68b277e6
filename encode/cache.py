"""Finished embeddings: who uses them, which are kept, which go first. Pure: no torch, no clock.

    add --> PINNED --unpin, the last--> IDLE --evict, or over the budget--> freed
              ^                          |
              +---------- take ----------+
    retire: never found again; freed with its last pin

Invariants
    one entry a key   that can be found; a retired one has no key any more
    pinned            neither evicted nor freed, whoever asks for room
    order             the idle entry that was used longest ago goes first
    budget            entries that can be found take at most `budget` bytes, or the
                      excess is pinned
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

Place = TypeVar("Place")


@dataclass(slots=True, eq=False)
class Entry(Generic[Place]):
    """One sealed embedding. Made and changed by its `EmbeddingCache` only."""

    key: bytes
    place: Place
    nbytes: int
    """That its place takes of the arena."""
    checksum: int
    pins: int
    """Tickets and leases that use it."""
    retired: bool = False


class EmbeddingCache(Generic[Place]):
    """Knows memory only by `free`, which is called once for each entry; `evicted` counts.
    A budget of 0 keeps nothing that nobody uses, and finds nothing."""

    def __init__(
        self,
        budget: int,
        free: Callable[[Place], None],
        evicted: Callable[[], None] = lambda: None,
    ) -> None:
        self._budget = budget
        self._free = free
        self._evicted = evicted
        self._found: dict[bytes, Entry[Place]] = {}
        self._idle: dict[bytes, Entry[Place]] = {}  # least recently used first
        self._pinned: set[Entry[Place]] = set()
        self.kept_bytes = 0
        """Of all entries that can be found."""
        self.idle_bytes = 0
        self.pinned_bytes = 0
        """Of all that somebody uses, the retired ones included."""

    @property
    def enabled(self) -> bool:
        return self._budget > 0

    @property
    def idle(self) -> int:
        """Entries that can be evicted."""
        return len(self._idle)

    def take(self, key: bytes) -> Entry[Place] | None:
        """The entry of `key` with one pin more, or None."""
        entry = self._found.get(key)
        if entry is None:
            return None
        if not entry.pins:
            del self._idle[key]
            self.idle_bytes -= entry.nbytes
            self._pin(entry)
        entry.pins += 1
        return entry

    def add(self, key: bytes, place: Place, nbytes: int, checksum: int, pins: int) -> Entry[Place]:
        """Keep a new embedding; its place is the cache's from now on. With no pins it is
        idle, and may be freed before this returns."""
        assert key not in self._found, "encoded twice"
        entry = Entry(key, place, nbytes, checksum, pins, retired=not self.enabled)
        if self.enabled:
            self._found[key] = entry
            self.kept_bytes += nbytes
        self._pin(entry)
        if not pins:
            self._let_go(entry)
        self._trim()
        return entry

    def unpin(self, entry: Entry[Place]) -> None:
        """One user less."""
        assert entry.pins > 0, "unpinned twice"
        entry.pins -= 1
        if not entry.pins:
            self._let_go(entry)
            self._trim()

    def retire(self, entry: Entry[Place]) -> None:
        """Its bytes are in doubt: nobody new gets them. Somebody must still use it."""
        assert entry.pins > 0
        if not entry.retired:
            entry.retired = True
            del self._found[entry.key]
            self.kept_bytes -= entry.nbytes

    def evict(self) -> bool:
        """Free the idle entry that was used longest ago; false if there is none."""
        key = next(iter(self._idle), None)
        if key is None:
            return False
        entry = self._idle.pop(key)
        del self._found[key]
        self.idle_bytes -= entry.nbytes
        self.kept_bytes -= entry.nbytes
        self._evicted()
        self._free(entry.place)
        return True

    def _trim(self) -> None:
        while self.kept_bytes > self._budget and self.evict():
            pass

    def _pin(self, entry: Entry[Place]) -> None:
        self._pinned.add(entry)
        self.pinned_bytes += entry.nbytes

    def _let_go(self, entry: Entry[Place]) -> None:
        self._pinned.remove(entry)
        self.pinned_bytes -= entry.nbytes
        if entry.retired:
            self._free(entry.place)
        else:
            self._idle[entry.key] = entry
            self.idle_bytes += entry.nbytes

    def check_integrity(self) -> None:
        """Assert the table at the top of this file."""
        assert all(self._found[key] is entry for key, entry in self._idle.items())
        assert all(entry.pins == 0 and not entry.retired for entry in self._idle.values())
        assert all(entry.pins > 0 for entry in self._pinned)
        for key, entry in self._found.items():
            assert entry.key == key
            assert not entry.retired
            assert (entry in self._pinned) != (key in self._idle)
        assert self.kept_bytes == _bytes(self._found.values())
        assert self.idle_bytes == _bytes(self._idle.values())
        assert self.pinned_bytes == _bytes(self._pinned)
        assert self.kept_bytes <= self._budget or not self._idle


def _bytes(entries: Iterable[Entry[Place]]) -> int:
    return sum(entry.nbytes for entry in entries)
