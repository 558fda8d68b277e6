"""Variable-sized rows in one registered buffer: outgoing and landing memory.

`Extents` is the bookkeeping alone (pure); `Arena` adds the bytes.

Invariants of `Extents`, checked by `check_integrity()`:

| what                                   | holds                              |
|----------------------------------------|------------------------------------|
| used and free extents together         | cover [0, nbytes) exactly, once    |
| every offset and every reserved length | a multiple of `alignment`          |
| two free extents                       | never touch (coalesced at once)    |
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING

from epd.errors import EpdError, ErrorKind
from epd.pages import touched

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Extent:
    """A reserved piece of an arena. `nbytes` is what was asked for."""

    offset: int
    nbytes: int


class Extents:
    """Best fit with immediate coalescing over [0, nbytes)."""

    def __init__(self, nbytes: int, alignment: int = 64) -> None:
        if nbytes <= 0 or alignment <= 0 or nbytes % alignment:
            raise ValueError(f"arena of {nbytes} bytes is no multiple of {alignment}")
        self.nbytes = nbytes
        self.alignment = alignment
        self._free: list[tuple[int, int]] = [(0, nbytes)]  # (offset, length), by offset
        self._used: dict[int, Extent] = {}

    def allocate(self, nbytes: int) -> Extent:
        """Reserve `nbytes` (> 0), aligned.

        Raises:
            EpdError: OVERLOADED, no free piece is long enough now.
        """
        assert nbytes > 0, nbytes
        need = self.rounded(nbytes)
        fits = [(length, index) for index, (_, length) in enumerate(self._free) if length >= need]
        if not fits:
            raise EpdError(
                ErrorKind.OVERLOADED,
                f"arena is full: {nbytes} bytes asked, {self.free_bytes} of {self.nbytes} free, "
                f"largest piece {self.largest_free}",
                retry_after_s=1.0,
            )
        length, index = min(fits)
        offset, _ = self._free[index]
        if length == need:
            del self._free[index]
        else:
            self._free[index] = (offset + need, length - need)
        extent = Extent(offset, nbytes)
        self._used[offset] = extent
        return extent

    def free(self, extent: Extent) -> None:
        """Give an extent back; freeing it twice is a bug of ours."""
        assert self._used.get(extent.offset) is extent, f"not reserved: {extent}"
        del self._used[extent.offset]
        start, end = extent.offset, extent.offset + self.rounded(extent.nbytes)
        index = bisect_left(self._free, (start, 0))
        if index < len(self._free) and self._free[index][0] == end:
            end += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == start:
            start = self._free.pop(index - 1)[0]
        insort(self._free, (start, end - start))

    @property
    def used_bytes(self) -> int:
        """Bytes that can't be allocated, rounding included."""
        return self.nbytes - self.free_bytes

    @property
    def free_bytes(self) -> int:
        return sum(length for _, length in self._free)

    @property
    def largest_free(self) -> int:
        return max((length for _, length in self._free), default=0)

    @property
    def open_extents(self) -> int:
        return len(self._used)

    def check_integrity(self) -> None:
        """Assert the table at the top of this file."""
        used = [(e.offset, self.rounded(e.nbytes), True) for e in self._used.values()]
        free = [(offset, length, False) for offset, length in self._free]
        position, after_free = 0, False
        for offset, length, is_used in sorted(used + free):
            assert offset == position, f"gap or overlap at {position}: next is {offset}"
            assert length > 0
            assert offset % self.alignment == length % self.alignment == 0
            assert is_used or not after_free, f"free neighbours at {offset}"
            position, after_free = offset + length, not is_used
        assert position == self.nbytes, f"ends at {position} of {self.nbytes}"

    def rounded(self, nbytes: int) -> int:
        """What an extent of `nbytes` takes."""
        return -(-nbytes // self.alignment) * self.alignment


class Arena(Extents):
    """Extents plus the bytes: host memory in large pages, touched once at creation.

    The arena owns the memory; register `address, nbytes` with the engine with
    the arena as owner, so that it outlives every read.
    """

    def __init__(self, nbytes: int, alignment: int = 64) -> None:
        super().__init__(nbytes, alignment)
        self.tensor = touched(nbytes)

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()

    def address_of(self, extent: Extent) -> int:
        return self.address + extent.offset

    def view(self, extent: Extent) -> torch.Tensor:
        """The extent's bytes, uint8 `[nbytes]`; a view, valid until it is freed."""
        return self.tensor[extent.offset : extent.offset + extent.nbytes]
