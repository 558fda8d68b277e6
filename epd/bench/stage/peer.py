"""A worker's memory in a process of its own, to be read from.

    python -m epd.bench.stage.peer NBYTES

Prints one JSON line about itself and stays until stdin ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from epd.config import TransferConfig
from epd.pages import large_pages
from epd.transfer.contract import Peer
from epd.transfer.engine import Engine

FINGERPRINT = "bench"
_PATTERN_BYTES = 1 << 16


class Memory:
    """Host memory by address, as a worker's is (`epd.pages`), touched once."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.bytes = large_pages(nbytes)
        self._exported = (ctypes.c_char * nbytes).from_buffer(self.bytes)
        self.address = ctypes.addressof(self._exported)
        self.bytes[:] = bytes(nbytes)


def content(nbytes: int) -> bytes:
    """What a peer's memory holds; unlike from page to page."""
    pattern = random.Random(1).randbytes(_PATTERN_BYTES + 4096)
    repeats = nbytes // _PATTERN_BYTES + 1
    return b"".join(pattern[i % 4096 : i % 4096 + _PATTERN_BYTES] for i in range(repeats))[:nbytes]


@dataclass(frozen=True, slots=True)
class Remote:
    """The process, from outside."""

    peer: Peer
    address: int


@contextmanager
def peer_process(nbytes: int) -> Iterator[Remote]:
    """One peer with `nbytes` of `content`, for the block."""
    with subprocess.Popen(
        [sys.executable, "-m", __name__, str(nbytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, "the peer process did not start"
            said = json.loads(line)
            yield Remote(Peer(said["session"], said["epoch"], said["page"]), said["address"])
        finally:
            process.stdin.close()
            process.wait(20)


async def serve(nbytes: int) -> None:
    memory = Memory(nbytes)
    memory.bytes[:] = content(nbytes)
    engine = Engine(TransferConfig(), FINGERPRINT, epoch=2)
    engine.start()
    engine.register(memory.address, nbytes, memory)
    peer = engine.peer
    said = {"session": peer.session, "epoch": peer.epoch, "page": peer.identity_address}
    print(json.dumps(said | {"address": memory.address}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await engine.close()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
