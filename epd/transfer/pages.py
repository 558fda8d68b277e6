"""The two pages every engine registers: what peers read, and where we read theirs."""

from __future__ import annotations

import ctypes
import mmap

from epd.errors import EpdError, ErrorKind
from epd.transfer.identity import IDENTITY_BYTES, Identity

_SLOT = 64
assert IDENTITY_BYTES <= _SLOT


class OwnPages:
    """Page 0 holds our identity; page 1 is slots for peers' identity pages.

    Registered as a whole, since RDMA needs the local side registered too.
    """

    nbytes = 2 * mmap.PAGESIZE

    def __init__(self, identity: Identity) -> None:
        self._memory = mmap.mmap(-1, self.nbytes)
        self._memory[:IDENTITY_BYTES] = identity.pack()
        self._exported = (ctypes.c_char * self.nbytes).from_buffer(self._memory)
        self.address = ctypes.addressof(self._exported)
        self._free = list(range(mmap.PAGESIZE, self.nbytes, _SLOT))

    def take_slot(self) -> int:
        """
        Raises:
            EpdError: OVERLOADED, every slot belongs to a connection being opened.
        """
        if not self._free:
            most = mmap.PAGESIZE // _SLOT
            reason = f"{most} peers are being connected to, the most at once"
            raise EpdError(ErrorKind.OVERLOADED, reason, retry_after_s=1.0)
        return self._free.pop()

    def give_slot(self, slot: int) -> None:
        assert slot not in self._free
        self._free.append(slot)

    def slot_address(self, slot: int) -> int:
        return self.address + slot

    def slot_bytes(self, slot: int) -> bytes:
        return self._memory[slot : slot + IDENTITY_BYTES]
