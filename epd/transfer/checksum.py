"""The 64-bit sum that travels with every block and every embedding.

xxh3_64 over host memory, in place: nothing is copied. It is computed once, when
the bytes are sealed, and compared after the read; a transport that delivers
wrong bytes then fails one request instead of answering it with garbage. It is
no defence against an attacker (see docs/transfer.md).
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import xxhash

from epd.errors import EpdError, ErrorKind

if TYPE_CHECKING:
    import torch


def checksum(memory: memoryview | bytes | bytearray | torch.Tensor) -> int:
    """Sum over all bytes of a contiguous buffer or a contiguous CPU tensor.

    Any dtype: the sum is over the bytes, so two views of the same memory agree.
    """
    if isinstance(memory, (memoryview, bytes, bytearray)):
        return xxhash.xxh3_64_intdigest(memory)
    assert memory.device.type == "cpu", "a device computes its own sums"
    assert memory.is_contiguous(), "a sum covers one contiguous piece"
    return checksum_at(memory.data_ptr(), memory.numel() * memory.element_size())


def checksum_at(address: int, nbytes: int) -> int:
    """Sum over host memory by address. The caller keeps the memory alive."""
    if nbytes == 0:
        return xxhash.xxh3_64_intdigest(b"")
    return xxhash.xxh3_64_intdigest((ctypes.c_ubyte * nbytes).from_address(address))


def verify_at(address: int, nbytes: int, expected: int, what: str) -> None:
    """Compare what was read with the sum that was announced.

    Raises:
        EpdError: CHECKSUM_MISMATCH, naming `what` and both sums.
    """
    actual = checksum_at(address, nbytes)
    if actual != expected:
        raise EpdError(
            ErrorKind.CHECKSUM_MISMATCH,
            f"{what}: {nbytes} bytes arrived with sum {actual:016x}, announced {expected:016x}",
        )
