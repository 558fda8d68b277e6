"""Which descriptor goes next: the reads in flight and their fair share.

Pure: no Mooncake, no clock, no tasks. `Engine` submits what `take()` returns and
reports back; this file knows when a read is *settled*, which is the one moment
its memory may be used or freed.

    add --> waiting --take--> submitting --submitted--> in flight --finished--> settled
              |                                            |
              +--stop: todo is dropped --------------------+--> parked until settled

A read is parked when nobody waits for it any more (failed, timed out, cancelled)
while Mooncake may still write into its memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from epd.transfer.pieces import Piece

WINDOW = 16
"""Descriptors under way per peer: one for each of Mooncake's connections to it. More
is faster for scattered blocks (512 of 64 KiB: 41 ms, 27 ms with 32, 21 ms with 64),
but those that queue behind a stopped peer's connections wait for a second, third,
... progress timeout: with one each, all memory is back after the first. A stopped
peer holds only its own window, so others go on."""


@dataclass(slots=True, eq=False)
class Read:
    """One read: what is left to submit, what Mooncake works on, who is pinned."""

    name: str
    """Mooncake's name of the session (`epd.transfer.sessions`)."""
    todo: deque[Piece]
    owner: object
    """Kept alive until settled: the local memory is inside it."""
    key: Hashable = None
    ids: set[int] = field(default_factory=set)
    """What Mooncake works on, by ticket."""
    submitting: int = 0
    failure: str | None = None
    stopped: bool = False
    """Nothing more is submitted. Read by the submitting thread too."""

    @property
    def settled(self) -> bool:
        """Mooncake does not, and will not, touch this read's memory."""
        return not (self.ids or self.submitting or self.todo)

    @property
    def parked(self) -> bool:
        return self.stopped and not self.settled


class Flow:
    """Round robin over the reads of each peer, within a window per peer."""

    def __init__(self, window: int = WINDOW) -> None:
        self.window = window
        self._queues: dict[str, deque[Read]] = {}  # reads with something to submit
        self._slots: dict[str, int] = {}  # descriptors under way
        self._reads: set[Read] = set()

    def add(self, read: Read) -> None:
        assert read.todo
        assert not read.stopped
        self._reads.add(read)
        self._queues.setdefault(read.name, deque()).append(read)

    def take(self) -> list[tuple[Read, Piece]]:
        """What to submit now; each comes back through `submitted`."""
        taken = []
        for name, queue in list(self._queues.items()):
            free = self.window - self._slots.get(name, 0)
            while queue and free > 0:
                read = queue.popleft()
                taken.append((read, read.todo.popleft()))
                read.submitting += 1
                free -= 1
                if read.todo:
                    queue.append(read)
            self._set_slots(name, self.window - free)
            if not queue:
                del self._queues[name]
        return taken

    def submitted(self, read: Read, ticket: int | None) -> None:
        """Mooncake has one of the read's taken pieces, under this ticket; None: refused, or
        skipped as stopped."""
        read.submitting -= 1
        if ticket is not None:
            read.ids.add(ticket)
        else:
            self._set_slots(read.name, self._slots[read.name] - 1)
            if not read.stopped:
                self.stop(read, "the engine refused a descriptor")
        self._forget_if_settled(read)

    def finished(self, read: Read, ticket: int, ok: bool) -> None:
        """A ticket is terminal. A failed one stops its read."""
        read.ids.remove(ticket)
        self._set_slots(read.name, self._slots[read.name] - 1)
        if not ok and not read.stopped:
            self.stop(read, "the engine reports a failed read")
        self._forget_if_settled(read)

    def stop(self, read: Read, failure: str) -> None:
        """Submit nothing more of it; it stays here until it is settled."""
        read.stopped = True
        read.failure = read.failure or failure
        read.todo.clear()
        queue = self._queues.get(read.name)
        if queue and read in queue:
            queue.remove(read)
        self._forget_if_settled(read)

    def all(self) -> list[Read]:
        """Every unsettled read."""
        return list(self._reads)

    def of(self, key: Hashable) -> list[Read]:
        """Unsettled reads with this key."""
        return [read for read in self._reads if read.key == key]

    @property
    def outstanding(self) -> int:
        """Descriptors with Mooncake or on their way to it."""
        return sum(self._slots.values())

    @property
    def unsettled(self) -> int:
        return len(self._reads)

    @property
    def parked(self) -> int:
        return sum(read.parked for read in self._reads)

    def check_integrity(self) -> None:
        """Assert that slots, ids and reads agree."""
        count: dict[str, int] = {}
        for read in self._reads:
            assert not read.settled, read
            assert not (read.stopped and read.todo), read
            count[read.name] = count.get(read.name, 0) + len(read.ids) + read.submitting
        assert {name: n for name, n in count.items() if n} == self._slots
        assert all(n <= self.window for n in self._slots.values())

    def _set_slots(self, name: str, count: int) -> None:
        assert count >= 0, (name, count)
        if count:
            self._slots[name] = count
        else:
            self._slots.pop(name, None)

    def _forget_if_settled(self, read: Read) -> None:
        if read.settled:
            self._reads.discard(read)
