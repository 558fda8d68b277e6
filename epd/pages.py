"""Host memory: large pages for weights, KV blocks and embeddings, and what is given back.

Whoever streams over 4 KiB pages spends a good part of the time on finding them, in a virtual
machine most of all: one thread read 942 MiB in 50 ms, in pages of 2 MiB in 34.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from epd.errors import invalid

if TYPE_CHECKING:
    import torch

LARGE: Final = 2 << 20
_ADVICE: Final = ("MADV_HUGEPAGE", "MADV_DONTFORK")


def large_pages(nbytes: int) -> memoryview:
    """Zeros, writable, at a multiple of 2 MiB; owns its memory. Pages are 2 MiB where the
    kernel gives them on request, and exist when they are first written to.

    A forked process does not have it: the first to write to a page that both have would have
    to copy it, and what Mooncake reads or writes must stay where it is.

    Raises:
        OSError: there is not so much memory; see `asked_for_by`.
    """
    size = -(-nbytes // LARGE) * LARGE
    try:
        memory = mmap.mmap(-1, size + LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise OSError(error.errno, f"{nbytes >> 20} MiB: {error.strerror}") from None
    for name in _ADVICE:
        with contextlib.suppress(OSError, AttributeError):  # advice: without it, it is slower
            memory.madvise(getattr(mmap, name))
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % LARGE
    return memoryview(memory)[start : start + nbytes]


@contextlib.contextmanager
def asked_for_by(*keys: str) -> Iterator[None]:
    """Memory that is asked for in here is as large as these keys of the configuration say.

    Raises:
        EpdError: INVALID_REQUEST, it can't be had.
    """
    try:
        yield
    except OSError as error:
        raise invalid(f"{' and '.join(keys)}: {error.strerror}", keys[0]) from error


def untouched(nbytes: int) -> torch.Tensor:
    """`large_pages` as a tensor, uint8 `[nbytes]`."""
    import torch

    return torch.frombuffer(large_pages(nbytes), dtype=torch.uint8)


def touched(nbytes: int) -> torch.Tensor:
    """The same, every page written to: a first touch inside a transfer would be a page fault
    on Mooncake's thread, and the process's resident size is what it will be under load."""
    return untouched(nbytes).zero_()


def give_back() -> None:
    """Return the pages of the C heap that hold nothing to the kernel: 15 ms, for moments at
    which much was freed for good. Allocators keep what loading took, for a process that will
    not load again. Without glibc it does nothing.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
