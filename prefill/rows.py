"""Whose rows lie where in landing memory, and which stay for later. Pure: no torch, no I/O.

    reserve --> PLACED --read and verified--> READY --last holder leaves--> IDLE --> evicted
                  ^  |                          ^                            |
    a read that   |  | busy: a read may write   +------- reserve ------------+
    failed: next  +--+ into it
    holder reads

Invariants (`check_integrity`)

    | holders | ready | busy | place is                                               |
    |---------|-------|------|--------------------------------------------------------|
    | n > 0   | any   | any  | kept                                                   |
    | 0       | yes   | no   | idle: found by its key, free for whoever needs it      |
    | 0       | no    | yes  | kept until the read is settled, found by nobody        |
    | 0       | no    | no   | freed                                                  |

Rows are named by the picture's full digest, which covers the weights and the tenant.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from epd.errors import EpdError
from epd.transfer.arena import Extent, Extents

Count = Callable[[str, int], None]


@dataclass(slots=True, eq=False)
class Rows:
    """One picture's place. Made and changed by its `RowTable` only."""

    key: Hashable
    extent: Extent
    holders: int = 0
    """Images of requests that use it."""
    ready: bool = False
    """The rows are here and verified, and never written again."""
    busy: bool = False
    """A read may write into it."""


class RowTable:
    """Over the memory that `extents` keeps the books of. Off (`enabled` false) no two
    images share a place and nothing stays."""

    def __init__(self, extents: Extents, *, enabled: bool, count: Count) -> None:
        self._extents = extents
        self._enabled = enabled
        self._count = count
        self._all: set[Rows] = set()
        self._found: dict[Hashable, Rows] = {}
        self._idle: OrderedDict[Rows, None] = OrderedDict()  # least recently used first
        self.idle_bytes = 0

    def __len__(self) -> int:
        return len(self._found)

    @property
    def idle(self) -> int:
        """Rows that nobody uses."""
        return len(self._idle)

    def reserve(self, wanted: Sequence[tuple[bytes, int]]) -> list[Rows] | None:
        """A place for each (digest, bytes), or None and no place. Equal ones share it, with
        whoever has it already, too; the caller becomes a holder for each.

        What is asked for fits the empty memory (else it would wait for ever).
        """
        keys: list[Hashable] = [want if self._enabled else object() for want in wanted]
        sizes = {key: size for key, (_, size) in zip(keys, wanted, strict=True)}
        known = {key: self._found[key] for key in sizes if key in self._found}
        for rows in known.values():
            self._hold(rows)
        fresh = self._place({key: size for key, size in sizes.items() if key not in known})
        if fresh is None:
            for rows in known.values():
                self.release(rows)
            if len(self._all) > len(self._idle):
                return None
            # Only idle rows are left, but they cut the memory into pieces too short.
            while self._evict():
                pass
            known, fresh = {}, self._place(sizes)
            assert fresh is not None, "it fits the empty memory"
        places = known | fresh
        for key in keys:
            self._hold(places[key])
        for rows in places.values():
            rows.holders -= 1  # the one that kept it while the others were looked for
        self._note(known, fresh)
        return [places[key] for key in keys]

    def _note(self, known: dict[Hashable, Rows], fresh: dict[Hashable, Rows]) -> None:
        if self._enabled:
            ready = sum(rows.ready for rows in known.values())
            self._count("hit", ready)
            self._count("joined", len(known) - ready)
            self._count("miss", len(fresh))

    def _place(self, sizes: dict[Hashable, int]) -> dict[Hashable, Rows] | None:
        """New rows with one holder; evicts for them where it helps."""
        need = sum(self._extents.rounded(size) for size in sizes.values())
        if need > self._extents.free_bytes + self.idle_bytes:
            return None
        made: dict[Hashable, Rows] = {}
        for key, size in sizes.items():
            extent = self._allocate(size)
            if extent is None:
                for rows in made.values():
                    self.release(rows)
                return None
            rows = made[key] = Rows(key, extent)
            self._all.add(rows)
            if self._enabled:
                self._found[key] = rows
            self._hold(rows)
        return made

    def _allocate(self, size: int) -> Extent | None:
        while True:
            try:
                return self._extents.allocate(size)
            except EpdError:
                if not self._evict():
                    return None

    def _evict(self) -> bool:
        if not self._idle:
            return False
        rows, _ = self._idle.popitem(last=False)
        self.idle_bytes -= self._extents.rounded(rows.extent.nbytes)
        self._count("evicted", 1)
        self._drop(rows)
        return True

    def _hold(self, rows: Rows) -> None:
        if rows in self._idle:
            del self._idle[rows]
            self.idle_bytes -= self._extents.rounded(rows.extent.nbytes)
        rows.holders += 1

    def release(self, rows: Rows) -> None:
        """One holder less."""
        assert rows.holders > 0, "released twice"
        rows.holders -= 1
        self._settle(rows)

    def reading(self, rows: Rows) -> None:
        """A read into it begins."""
        assert rows.holders
        assert not rows.ready
        assert not rows.busy
        rows.busy = True

    def landed(self, rows: Rows) -> None:
        """The read is over, and what it brought is verified."""
        rows.busy, rows.ready = False, True
        self._settle(rows)

    def settled(self, rows: Rows) -> None:
        """The read brought nothing, and writes no more."""
        rows.busy = False
        self._settle(rows)

    def forget(self, rows: Rows) -> None:
        """Give it to nobody else: what it holds is in doubt. Holders go on."""
        if self._found.get(rows.key) is rows:
            del self._found[rows.key]

    def _settle(self, rows: Rows) -> None:
        """Put a place that nobody holds where it belongs."""
        if rows.holders:
            return
        if rows.ready and self._found.get(rows.key) is rows:
            self._idle[rows] = None
            self.idle_bytes += self._extents.rounded(rows.extent.nbytes)
        else:
            self.forget(rows)
            if not rows.busy:
                self._drop(rows)

    def _drop(self, rows: Rows) -> None:
        self.forget(rows)
        self._all.remove(rows)
        self._extents.free(rows.extent)

    def check_integrity(self) -> None:
        """Assert the table at the top of this file, and the memory's books."""
        for rows in self._all:
            assert not (rows.ready and rows.busy)
            assert rows.holders or rows.busy or rows in self._idle, "nobody needs it"
            assert (rows in self._idle) == (not rows.holders and rows.ready)
            assert rows.holders or rows.ready or self._found.get(rows.key) is not rows
        assert set(self._found.values()) <= self._all
        idle = sum(self._extents.rounded(rows.extent.nbytes) for rows in self._idle)
        assert self.idle_bytes == idle
        assert self._extents.open_extents == len(self._all)
        self._extents.check_integrity()
