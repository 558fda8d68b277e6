"""Real Mooncake between real processes: right bytes, or a typed error in time.

The reader is this process; the owners are `peer_process`es that are killed,
stopped, replaced and made to lie. Everything runs on loopback over TCP.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import suppress
from dataclasses import replace

import pytest

from epd.errors import EpdError, ErrorKind
from epd.transfer.checksum import checksum, verify_at
from epd.transfer.contract import Peer
from epd.transfer.driver import ReadFailed
from epd.transfer.engine import Engine
from epd.transfer.faults import Faults
from epd.transfer.pieces import CHUNK_BYTES
from tests.e2e.peer_process import NBYTES, Memory, PeerProcess, content
from tests.e2e.transfer_reader import (  # noqa: F401 (fixtures)
    CONFIG,
    SEED,
    Reader,
    another_peer,
    clean_memory,
    owner_fixture,
    reader_fixture,
)
from tests.waiting import LIMIT_S, promised, soon, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


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
    assert stats.descriptors == 512 * size // CHUNK_BYTES  # type: ignore[attr-defined]
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
    await until(lambda: reader.engine.outstanding)
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
        with soon(promised(3), instead_of="the read's deadline of 10 s"):
            error = await reader.fails(owner, reader.piece(owner, 0, remote, 4096))
        assert error.kind is ErrorKind.TRANSFER_FAILED
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
        await asyncio.sleep(0.2)  # into a read of seconds
        assert not task.done()
        victim.kill()
        with soon(promised(2), instead_of="a time limit"), pytest.raises(EpdError) as failed:
            await task
        assert failed.value.kind is ErrorKind.TRANSFER_FAILED
        del failed, task
        assert await reader.engine.drain_reads("killed", LIMIT_S)
        await is_freed(gone)
        with soon(promised(1), instead_of="an answer"):
            assert "can't be reached" in (await reader.fails(victim)).message
        assert (await reader.fails(victim)).retry_after_s


async def test_a_stopped_peer_fails_in_time_and_a_healthy_one_is_not_held_up(
    reader: Reader, owner: PeerProcess
) -> None:
    with another_peer(seed=3) as victim:
        await reader.read(victim)
        task = asyncio.create_task(reader.read(victim, *reader.long_read(victim), key="stopped"))
        await asyncio.sleep(0.1)  # into a read of seconds
        victim.stop()
        healthy = 0
        with soon(promised(6), instead_of="the read's deadline of 10 s"):
            while not task.done():
                await reader.read(owner)
                healthy += 1
                await asyncio.sleep(0.02)
        with pytest.raises(EpdError) as failed:
            await task
        assert failed.value.kind is ErrorKind.TRANSFER_FAILED
        assert healthy > 5, "a healthy peer's reads waited for the stopped one"
        assert not reader.engine.stuck
        # It is left alone at once; then a probe finds it stopped, and the back-off follows.
        assert "silent for" in (await reader.fails(victim)).message
        await asyncio.sleep(CONFIG.backoff_s)  # only then it is tried again
        with soon(promised(CONFIG.connect_timeout_s + 1), instead_of="the read's deadline of 10 s"):
            assert "no answer within" in (await reader.fails(victim)).message
        with soon(CONFIG.connect_timeout_s, instead_of="another probe"):
            await reader.fails(victim)
        # Mooncake's own timeout ends what we gave up: nothing stays pinned.
        assert await reader.engine.drain_reads("stopped", LIMIT_S)
        victim.resume()
        await asyncio.sleep(CONFIG.backoff_s)  # only then it is tried again
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
        await until(lambda: _mooncake_has_it(reader.engine))
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
        assert await reader.engine.drain_reads("cancelled", LIMIT_S)
        assert freed == ["blocks"]
        assert reader.engine.parked == 0
        await is_freed(gone)


def _mooncake_has_it(engine: Engine) -> bool:
    """And not only the thread that submits, which would drop what nobody waits for any more."""
    driver = engine._driver
    return driver is not None and bool(driver._under_way)


async def is_freed(reference: weakref.ref[Memory]) -> None:
    """Soon, not at once: tracebacks and a thread about to sleep may still refer to it."""
    await until(lambda: gc.collect() >= 0 and reference() is None)


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
