"""Real Mooncake between real processes: right bytes, or a typed error in time.

The reader is this process; the owners are `peer_process`es that are killed,
stopped, replaced and made to lie. Everything runs on loopback over TCP.
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import struct
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from epd.config import TransferConfig
from epd.errors import EpdError, ErrorKind
from epd.transfer import metrics
from epd.transfer.checksum import checksum, verify_at
from epd.transfer.contract import Peer
from epd.transfer.driver import ReadFailed
from epd.transfer.engine import Engine
from epd.transfer.faults import Faults
from epd.transfer.pieces import Piece
from tests.e2e.peer_process import NBYTES, Memory, PeerProcess, content, handles

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]

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


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def reader() -> AsyncIterator[Reader]:
    reader = Reader()
    yield reader
    assert reader.engine.parked == 0
    assert await reader.engine.close(), "reads left over"


@pytest.fixture(scope="module")
def owner() -> Iterator[PeerProcess]:
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


async def test_reads_exactly_the_bytes_asked_for(reader: Reader, owner: PeerProcess) -> None:
    expected = content(SEED, NBYTES)
    lengths = [1, 63, 4097, 1 << 16, (9 << 20) + 5]
    for length in lengths:
        reader.memory.bytes[:] = bytes(NBYTES)
        stats = await reader.read(owner, reader.piece(owner, 129, 777, length), kind="embedding")
        assert reader.memory.bytes[129 : 129 + length] == expected[777 : 777 + length]
        assert not any(reader.memory.bytes[:129])
        assert not any(reader.memory.bytes[129 + length : 129 + length + 4096])
        assert stats.nbytes == length  # type: ignore[attr-defined]


async def test_512_scattered_blocks_land_where_they_belong(
    reader: Reader, owner: PeerProcess
) -> None:
    expected, size = content(SEED, NBYTES), 1 << 16
    pieces = [reader.piece(owner, i * size, (511 - i) * size, size) for i in range(512)]
    stats = await reader.read(owner, *pieces)
    assert stats.descriptors == 512  # type: ignore[attr-defined]
    for i in range(512):
        theirs = expected[(511 - i) * size : (512 - i) * size]
        assert reader.memory.bytes[i * size : (i + 1) * size] == theirs


async def test_neighbouring_blocks_need_few_descriptors(reader: Reader, owner: PeerProcess) -> None:
    size = 1 << 16
    pieces = [reader.piece(owner, i * size, i * size, size) for i in range(512)]
    stats = await reader.read(owner, *pieces)
    assert stats.descriptors == 4  # type: ignore[attr-defined]
    assert reader.memory.bytes[: 512 * size] == content(SEED, 512 * size)


async def test_many_reads_at_once_do_not_mix(reader: Reader, owner: PeerProcess) -> None:
    expected, size = content(SEED, NBYTES), 1 << 20
    reads = (
        reader.read(owner, reader.piece(owner, i * size, (i * 7 % 64) * size, size))
        for i in range(32)
    )
    await asyncio.gather(*reads)
    for i in range(32):
        theirs = expected[(i * 7 % 64) * size : (i * 7 % 64 + 1) * size]
        assert reader.memory.bytes[i * size : (i + 1) * size] == theirs


async def test_a_small_read_does_not_wait_for_a_large_one(
    reader: Reader, owner: PeerProcess
) -> None:
    large = asyncio.create_task(reader.read(owner, *reader.long_read(owner, 20)))
    await asyncio.sleep(0.05)
    await reader.read(owner)
    assert not large.done(), "the large read was too short to show anything"
    await large


@pytest.mark.parametrize("wrong", ["epoch", "fingerprint", "identity_address"])
async def test_another_life_or_model_is_refused_before_a_byte_is_read(
    reader: Reader, owner: PeerProcess, wrong: str
) -> None:
    peer, fingerprint = owner.peer, "f00d"
    if wrong == "epoch":
        peer = replace(peer, epoch=peer.epoch + 1)
    elif wrong == "fingerprint":
        fingerprint = "beef"
    else:  # readable memory, but no identity page
        peer = Peer(peer.session, peer.epoch + 2, owner.address)
    error = await reader.fails(owner, peer=peer, fingerprint=fingerprint)
    assert error.kind is ErrorKind.CONTRACT_MISMATCH
    assert not any(reader.memory.bytes[: 1 << 16])
    await reader.read(owner)


async def test_a_bad_address_is_refused_and_the_peer_survives(
    reader: Reader, owner: PeerProcess
) -> None:
    for remote in (NBYTES, NBYTES - 100, -owner.address + 4096):
        start = time.monotonic()
        error = await reader.fails(owner, reader.piece(owner, 0, remote, 4096))
        assert error.kind is ErrorKind.TRANSFER_FAILED
        assert time.monotonic() - start < 2
    await reader.read(owner)
    assert reader.memory.bytes[: 1 << 16] == content(SEED, 1 << 16)


async def test_bytes_that_changed_after_sealing_are_caught(reader: Reader) -> None:
    with another_peer(seed=5, nbytes=1 << 20) as liar:
        sealed = checksum(content(5, 1 << 16))
        await reader.read(liar)
        verify_at(reader.memory.address, 1 << 16, sealed, "block 0")
        liar.ask("poke", offset=4711)
        await reader.read(liar)
        with pytest.raises(EpdError, match="block 0") as wrong:
            verify_at(reader.memory.address, 1 << 16, sealed, "block 0")
        assert wrong.value.kind is ErrorKind.CHECKSUM_MISMATCH


async def test_injected_faults_happen(reader: Reader, owner: PeerProcess) -> None:
    sealed = checksum(content(SEED, 1 << 16))
    before, reader.engine._faults = reader.engine._faults, Faults("transfer.flip:1/2")
    try:
        await reader.read(owner)
        with pytest.raises(EpdError, match="arrived with sum"):
            verify_at(reader.memory.address, 1 << 16, sealed, "block 0")
        await reader.read(owner)
        verify_at(reader.memory.address, 1 << 16, sealed, "block 0")
        reader.engine._faults = Faults("transfer.refuse")
        assert (await reader.fails(owner)).kind is ErrorKind.TRANSFER_FAILED
    finally:
        reader.engine._faults = before


async def test_a_killed_peer_fails_the_read_fast_and_lets_go_of_our_memory(
    reader: Reader,
) -> None:
    with another_peer(seed=2) as victim:
        pinned = Memory(4096)
        gone = weakref.ref(pinned)
        task = asyncio.create_task(
            reader.read(victim, *reader.long_read(victim), pinned=pinned, key="killed")
        )
        del pinned
        await asyncio.sleep(0.2)
        assert not task.done()
        victim.kill()
        start = time.monotonic()
        with pytest.raises(EpdError) as failed:
            await task
        assert time.monotonic() - start < 1.5
        assert failed.value.kind is ErrorKind.TRANSFER_FAILED
        del failed, task
        assert await reader.engine.drain_reads("killed", 2.0)
        await is_freed(gone)
        start = time.monotonic()
        assert "can't be reached" in (await reader.fails(victim)).message
        assert time.monotonic() - start < 0.5
        assert (await reader.fails(victim)).retry_after_s


async def test_a_stopped_peer_fails_in_time_and_a_healthy_one_is_not_held_up(
    reader: Reader, owner: PeerProcess
) -> None:
    with another_peer(seed=3) as victim:
        await reader.read(victim)
        start = time.monotonic()
        task = asyncio.create_task(reader.read(victim, *reader.long_read(victim), key="stopped"))
        await asyncio.sleep(0.1)
        victim.stop()
        slowest = 0.0
        while not task.done():
            before = time.monotonic()
            await reader.read(owner)
            slowest = max(slowest, time.monotonic() - before)
            await asyncio.sleep(0.02)
        with pytest.raises(EpdError) as failed:
            await task
        assert time.monotonic() - start < 6.0
        assert failed.value.kind is ErrorKind.TRANSFER_FAILED
        assert slowest < 1.0, "a healthy peer's read waited for the stopped one"
        assert not reader.engine.stuck
        # It is left alone at once; then a probe finds it stopped, and the back-off follows.
        start = time.monotonic()
        assert "silent for" in (await reader.fails(victim)).message
        assert time.monotonic() - start < 0.2
        await asyncio.sleep(CONFIG.backoff_s)
        start = time.monotonic()
        assert "no answer within" in (await reader.fails(victim)).message
        assert time.monotonic() - start < CONFIG.connect_timeout_s + 0.5
        start = time.monotonic()
        await reader.fails(victim)
        assert time.monotonic() - start < 0.2
        # Mooncake's own timeout ends what we gave up: nothing stays pinned.
        assert await reader.engine.drain_reads("stopped", 4.0)
        victim.resume()
        await asyncio.sleep(CONFIG.backoff_s)
        await reader.read(victim)
        assert reader.memory.bytes[: 1 << 16] == content(3, 1 << 16)


async def test_cancellation_parks_and_then_lets_go(reader: Reader) -> None:
    with another_peer(seed=4) as victim:
        await reader.read(victim)
        pinned = Memory(4096)
        gone = weakref.ref(pinned)
        victim.stop()
        task = asyncio.create_task(reader.read(victim, pinned=pinned, key="cancelled"))
        del pinned
        await asyncio.sleep(0.2)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        del task
        freed: list[str] = []
        reader.engine.when_settled("cancelled", lambda: freed.append("blocks"))
        assert reader.engine.parked == 1
        assert not await reader.engine.drain_reads("cancelled", 0.2)
        gc.collect()
        assert gone() is not None, "memory freed under a running read"
        assert freed == []
        victim.resume()
        assert await reader.engine.drain_reads("cancelled", 3.0)
        assert freed == ["blocks"]
        assert reader.engine.parked == 0
        await is_freed(gone)


async def is_freed(reference: weakref.ref[Memory]) -> None:
    """Soon, not at once: tracebacks and a thread about to sleep may still refer to it."""
    for _ in range(50):
        gc.collect()
        if reference() is None:
            return
        await asyncio.sleep(0.02)
    pytest.fail(f"the local memory stays pinned by {gc.get_referrers(reference())}")


class Address:
    """One host:port that leads to whichever engine is put behind it.

    A restarted worker can get its old port back; waiting for the kernel to give it
    out again takes a minute, so this forwards the handshake port instead. (Data
    goes to the port that the handshake names.)
    """

    def __init__(self) -> None:
        self.target = ""

    async def open(self) -> str:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self.target.split(":")
        up_reader, up_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(self._copy(reader, up_writer), self._copy(up_reader, writer))
        writer.close()
        up_writer.close()

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await source.read(1 << 16):
                sink.write(data)
            sink.write_eof()


async def test_a_worker_restarted_on_the_same_address_is_read_again(reader: Reader) -> None:
    address = Address()
    session = await address.open()
    with another_peer(seed=6, nbytes=1 << 20) as first:
        address.target = first.peer.session
        old = replace(first.peer, session=session)
        await reader.read(first, peer=old)
    with another_peer(seed=7, nbytes=1 << 20) as second:
        address.target = second.peer.session
        new = replace(second.peer, session=session)
        error = await reader.fails(second, peer=old)
        assert error.kind in (ErrorKind.TRANSFER_FAILED, ErrorKind.CONTRACT_MISMATCH)
        await reader.read(second, peer=new)
        assert reader.memory.bytes[: 1 << 16] == content(7, 1 << 16)
        # What names per life are for: under the first name Mooncake never recovers.
        assert reader.engine._driver is not None
        with pytest.raises(ReadFailed):
            await reader.engine._driver.run(
                session, [reader.piece(second, 0, 0, 64)], reader.memory, None
            )
    address.server.close()


async def test_nothing_leaks_over_200_connections(reader: Reader, owner: PeerProcess) -> None:
    await reader.read(owner)
    here, there = handles(), owner.ask("handles")
    for _ in range(200):
        reader.engine._sessions.doubt(owner.peer)
        await reader.read(owner)
    assert_no_growth(here, handles())
    assert_no_growth(there, owner.ask("handles"))


async def test_an_engine_that_is_closed_lets_go_of_threads_files_and_ports() -> None:
    before = handles()
    for epoch in range(3):
        engine = Engine(CONFIG, "f00d", epoch)
        engine.start()
        host, port = engine.peer.session.split(":")
        assert await engine.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), 1)
    assert_no_growth(before, handles())


def assert_no_growth(before: dict[str, int], after: dict[str, int]) -> None:
    for what, count in before.items():
        assert after[what] <= count + 3, (before, after)


async def test_a_configured_transport_that_is_not_in_use_refuses_to_start() -> None:
    if any(Path("/sys/class/infiniband").glob("*")):
        pytest.skip("this machine has an RDMA device")
    with another_peer(protocol="rdma") as refused:
        assert refused.info["param"] == "transfer.protocol"
        assert "Mooncake uses tcp, the configuration says rdma" in refused.info["error"]


async def test_ports_come_from_the_configured_range() -> None:
    with another_peer(port_min=18600, port_max=18640, nbytes=4096) as peer:
        assert 18600 <= int(peer.peer.session.split(":")[1]) <= 18640
        assert listening(peer.pid) <= set(range(18600, 18641))


def listening(pid: int) -> set[int]:
    """TCP ports that a process listens on."""
    inodes = {
        link.readlink().name for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()
    }
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    assert ports
    return ports


@contextmanager
def engine_that_stops_after_the_probe() -> Iterator[str]:
    """Answers one handshake, then accepts and never answers: the one moment at which
    a stopping peer takes Mooncake's lock with it."""
    body = b"\x01" + json.dumps({"protocol": "tcp", "tcp_data_port": 1, "name": "x:1"}).encode()
    listener = socket.create_server(("127.0.0.1", 0))
    held: list[socket.socket] = []

    def serve() -> None:
        with suppress(OSError):
            first, _ = listener.accept()
            first.recv(100)
            first.sendall(struct.pack("<Q", len(body)) + body)
            first.close()
            while True:
                held.append(listener.accept()[0])

    threading.Thread(target=serve, daemon=True).start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    for connection in [listener, *held]:
        connection.close()


async def test_a_stuck_engine_is_seen_and_does_not_stop_the_process(owner: PeerProcess) -> None:
    with another_peer(seed=8, nbytes=4096) as victim, engine_that_stops_after_the_probe() as trap:
        answer = await asyncio.to_thread(victim.ask, "read", session=trap, seconds=10.0)
        assert "no answer within" in answer["outcome"]
        assert answer["parked"] == 1
        assert answer["stuck_s"] > 2
        await asyncio.sleep(3)
        assert victim.ask("health")["stuck"]
        assert victim.ask("close", bound_s=0.2) is False


async def test_an_engine_reads_its_own_memory_by_a_copy(reader: Reader) -> None:
    """As colocated stages do: no Mooncake, but registered memory only, and counted apart."""
    memory, engine = reader.memory, reader.engine
    length = 5 << 20  # more than is copied in one go
    moved = metrics.LOCAL_BYTES.labels("kv")._value.get()
    through_mooncake = metrics.BYTES.labels("kv")._value.get()
    source = Memory(length)
    source.bytes[:] = content(SEED, length)
    engine.register(source.address, length, source)
    piece = Piece(memory.address, source.address, length)
    stats = await engine.read(engine.peer, "f00d", [piece], memory, 5.0, kind="kv")
    assert stats.nbytes == length
    assert memory.bytes[:length] == source.bytes[:]
    assert metrics.LOCAL_BYTES.labels("kv")._value.get() == moved + length
    assert metrics.BYTES.labels("kv")._value.get() == through_mooncake
    for start in (source.address + 1, source.address - 1):
        outside = Piece(memory.address, start, length)
        with pytest.raises(EpdError) as failed:
            await engine.read(engine.peer, "f00d", [outside], memory, 5.0)
        assert failed.value.kind is ErrorKind.TRANSFER_FAILED


async def test_another_life_on_the_same_address_is_no_copy(reader: Reader) -> None:
    engine = reader.engine
    other = replace(engine.peer, epoch=engine.peer.epoch + 1)
    piece = Piece(reader.memory.address, reader.memory.address + 4096, 64)
    with pytest.raises(EpdError) as failed:
        await engine.read(other, "f00d", [piece], reader.memory, 5.0)
    assert failed.value.kind is ErrorKind.CONTRACT_MISMATCH
