"""One engine: its start and end, its ports, what it leaves, and its own memory. Reads
between processes: test_transfer.py."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from epd.errors import EpdError, ErrorKind
from epd.transfer import metrics
from epd.transfer.engine import Engine
from epd.transfer.pieces import Piece
from tests.e2e.peer_process import Memory, PeerProcess, content, handles
from tests.e2e.transfer_reader import (  # noqa: F401 (fixtures)
    CONFIG,
    SEED,
    Reader,
    another_peer,
    clean_memory,
    owner_fixture,
    reader_fixture,
)
from tests.readings import reading
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


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
        await until(lambda: victim.ask("health")["stuck"])
        assert victim.ask("close", bound_s=0.2) is False


async def test_an_engine_reads_its_own_memory_by_a_copy(reader: Reader) -> None:
    """As colocated stages do: no Mooncake, but registered memory only, and counted apart."""
    memory, engine = reader.memory, reader.engine
    length = 5 << 20  # more than is copied in one go
    moved = reading(metrics.LOCAL_BYTES.labels("kv"))
    through_mooncake = reading(metrics.BYTES.labels("kv"))
    source = Memory(length)
    source.bytes[:] = content(SEED, length)
    engine.register(source.address, length, source)
    piece = Piece(memory.address, source.address, length)
    stats = await engine.read(engine.peer, "f00d", [piece], memory, 5.0, kind="kv")
    assert stats.nbytes == length
    assert memory.bytes[:length] == source.bytes[:]
    assert reading(metrics.LOCAL_BYTES.labels("kv")) == moved + length
    assert reading(metrics.BYTES.labels("kv")) == through_mooncake
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
