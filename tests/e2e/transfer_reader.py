"""A reader in the test's own process, and owners in others: what the transfer tests share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest
import pytest_asyncio

from epd.config import TransferConfig
from epd.errors import EpdError
from epd.transfer.engine import Engine
from epd.transfer.pieces import Piece
from tests.e2e.peer_process import NBYTES, Memory, PeerProcess

CONFIG = TransferConfig()
SEED = 1


class Reader:
    """An engine of this process with memory to read into."""

    def __init__(self) -> None:
        self.engine = Engine(CONFIG, "f00d", epoch=1)
        self.engine.start()
        self.memory = Memory(NBYTES)
        self.engine.register(self.memory.address, NBYTES, self.memory)

    def piece(self, owner: PeerProcess, local: int, remote: int, length: int) -> Piece:
        return Piece(self.memory.address + local, owner.address + remote, length)

    async def read(self, owner: PeerProcess, *pieces: Piece, **kwargs: object) -> object:
        """Read (64 KiB from the start, if not said otherwise) from a peer."""
        peer = kwargs.pop("peer", owner.peer)
        fingerprint = kwargs.pop("fingerprint", "f00d")
        pieces = pieces or (self.piece(owner, 0, 0, 1 << 16),)
        pinned = kwargs.pop("pinned", self.memory)
        return await self.engine.read(peer, fingerprint, pieces, pinned, 10.0, **kwargs)  # type: ignore[arg-type]

    async def fails(self, owner: PeerProcess, *pieces: Piece, **kwargs: object) -> EpdError:
        with pytest.raises(EpdError) as failed:
            await self.read(owner, *pieces, **kwargs)
        return failed.value

    def long_read(self, owner: PeerProcess, times: int = 200) -> list[Piece]:
        """About `times` x 25 ms of work for loopback."""
        return [self.piece(owner, 0, 0, NBYTES)] * times


@pytest_asyncio.fixture(name="reader", loop_scope="module", scope="module")
async def reader_fixture() -> AsyncIterator[Reader]:
    reader = Reader()
    yield reader
    assert reader.engine.parked == 0
    assert await reader.engine.close(), "reads left over"


@pytest.fixture(name="owner", scope="module")
def owner_fixture() -> Iterator[PeerProcess]:
    """A peer that outlives the module: whatever a test does, it must survive."""
    process = PeerProcess(seed=SEED)
    yield process
    process.kill()


@pytest.fixture(autouse=True)
def clean_memory(reader: Reader) -> None:
    reader.memory.bytes[: 1 << 20] = bytes(1 << 20)


@contextmanager
def another_peer(**options: object) -> Iterator[PeerProcess]:
    process = PeerProcess(**options)
    try:
        yield process
    finally:
        process.kill()
