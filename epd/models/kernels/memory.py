"""What happens to memory that is let go of."""

from __future__ import annotations

import ctypes
import mmap
from ctypes import c_int, c_void_p
from typing import Final

from torch import Tensor

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers of glibc's mallopt."""
_KEEP_BELOW: Final = 32 << 20
_KEEP_IN_ALL: Final = 128 << 20


def keep_freed_memory() -> None:
    """Let this process use freed tensors' memory again instead of returning it.

    By default glibc gives every tensor of more than a few hundred KiB back to the system,
    and the next one pays for new pages: half of the time of sampling from a vocabulary
    of 150,000. At most 128 MiB at the end of a heap are kept. Nothing without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _KEEP_BELOW)
        mallopt(_TRIM_THRESHOLD, _KEEP_IN_ALL)


def give_back(weight: Tensor) -> None:
    """Let the pages that `weight` alone lies on leave this process's resident memory.

    A checkpoint's file is mapped whole, so they stay mapped as long as any part of it
    is in use. Nothing reads them any more; those of a file would be read again.
    """
    page = mmap.PAGESIZE
    first = -(-weight.data_ptr() // page) * page
    last = (weight.data_ptr() + weight.numel() * weight.element_size()) // page * page
    if last > first:
        _advise(first, last - first, mmap.MADV_DONTNEED)


def _advise(address: int, nbytes: int, advice: int) -> None:
    """Advice only: where the system doesn't take it, nothing is wrong."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [c_void_p, ctypes.c_size_t, c_int]
    libc.madvise(address, nbytes, advice)
