"""Pinned host memory beside a device's pool, for transports that reach host memory only.

Block i of the device has block i of the mirror. A peer reads from, and this worker reads
into, the mirror; the device's block is copied to it when it is sealed, and from it when
it was read and verified. So checksums are the host's own, on CPU and GPU workers alike,
and the two may be peers of each other.

Copies go through a stream of their own, beside whatever the model computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PAGE_BYTES = 4096


class HostMirror:
    """Of `device` [num_blocks, block_bytes] uint8. Owns its memory, as large again.

    Every method returns when the bytes are where they should be. Any thread may call
    them, for blocks that nobody else writes to meanwhile.
    """

    def __init__(self, device: Tensor) -> None:
        self._device = device
        cuda = device.device.type == "cuda"
        memory = torch.zeros(device.numel() + PAGE_BYTES, dtype=torch.uint8, pin_memory=cuda)
        start = -memory.data_ptr() % PAGE_BYTES
        self.bytes = memory[start : start + device.numel()].view(device.shape)
        """[num_blocks, block_bytes] uint8 on the host, page-aligned."""
        self.bytes.fill_(0)  # touch every page now
        self._stream = torch.cuda.Stream(device.device) if cuda else None  # type: ignore[no-untyped-call]

    def to_host(self, blocks: Sequence[int]) -> None:
        """After all that was queued on the current stream, a forward that writes them."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device.device))
        self._copy(self._device, self.bytes, blocks)

    def to_device(self, blocks: Sequence[int]) -> None:
        """At once: no queued work may use these blocks. What is queued later sees them."""
        self._copy(self.bytes, self._device, blocks)

    def _copy(self, source: Tensor, to: Tensor, blocks: Sequence[int]) -> None:
        with torch.cuda.stream(self._stream):  # nothing without one
            for start, stop in runs(blocks):
                to[start:stop].copy_(source[start:stop], non_blocking=True)
        if self._stream is not None:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
            done.synchronize()


def runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """[start, stop) of neighbours that follow each other: each is one copy."""
    found: list[tuple[int, int]] = []
    for block in blocks:
        if found and found[-1][1] == block:
            found[-1] = (found[-1][0], block + 1)
        else:
            found.append((block, block + 1))
    return found
