"""Sleep until another process of this host rings: a futex in a file that both have mapped.

Nothing here reads or writes the mapped bytes but the kernel, so a file that somebody has cut
short makes a call fail, where a look at the memory would end the process (SIGBUS). Where the
futex can't be had (another architecture, a sandbox), sleeps are short, and nobody is waked.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import sys
import time
from typing import Final

_CALL: Final = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
"""futex(2); libc has no function for it."""
_WAIT, _WAKE, _ALL = 0, 1, 2**31 - 1
_SLEPT: Final = {errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR}
_NO_FUTEX_S: Final = 0.0005
_BYTES: Final = 4


class _Span(ctypes.Structure):
    """A timespec of 64-bit Linux."""

    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


class Bell:
    """Four bytes of an open file, at a multiple of four. `ring` may be called by any thread."""

    def __init__(self, file: int, at: int) -> None:
        """Raises OSError or ValueError: the file can't be mapped, or is too short."""
        self._file, self._at = file, at
        self._mapped = mmap.mmap(file, at + _BYTES)
        self._address = ctypes.addressof(ctypes.c_uint32.from_buffer(self._mapped, at))
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._call.restype = ctypes.c_long

    def state(self) -> int:
        """Another one after each ring: read it, look whether there is anything to wait for,
        then `hear` with it, and no ring in between is missed."""
        return int.from_bytes(os.pread(self._file, _BYTES, self._at), sys.byteorder)

    def ring(self) -> None:
        """All that sleep wake up."""
        now = time.monotonic_ns() % 2 ** (8 * _BYTES)  # no two processes ring the same
        with contextlib.suppress(OSError):  # a full disk: who misses it sleeps to the end
            os.pwrite(self._file, now.to_bytes(_BYTES, sys.byteorder), self._at)
        self._futex(_WAKE, _ALL)

    def hear(self, state: int, most_s: float) -> None:
        """Sleep until somebody rings; not at all if somebody has since `state`."""
        ns = max(0, int(most_s * 1e9))
        span = _Span(ns // 10**9, ns % 10**9)
        if self._futex(_WAIT, state, ctypes.byref(span)) not in _SLEPT:
            time.sleep(min(most_s, _NO_FUTEX_S))

    def close(self) -> None:
        """After the last sleep. Ends the process's POSIX locks in the file."""
        self._mapped.close()

    def _futex(self, what: int, value: int, span: object = None) -> int:
        """Returns what it failed of; EAGAIN if it didn't."""
        if _CALL is None:
            return errno.ENOSYS
        place, number = ctypes.c_void_p(self._address), ctypes.c_uint32(value)
        failed = self._call(ctypes.c_long(_CALL), place, what, number, span, None, 0) < 0
        return ctypes.get_errno() if failed else errno.EAGAIN
