"""What a pull through the transfer engine costs, beside what the machine can do.

    python -m bench.transfer [--rounds 15] [--json]

One peer process on loopback. Every round measures everything once, interleaved, so
that whatever else the machine does hits all alike; medians and minima are printed,
and the ratio of medians to a plain TCP socket.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import time
from collections.abc import Awaitable, Callable

from epd.config import TransferConfig
from epd.transfer.checksum import checksum_at
from epd.transfer.engine import Engine
from epd.transfer.pieces import Piece
from tests.e2e.peer_process import NBYTES, Memory, PeerProcess

MIB = 1 << 20
BLOCK = 64 << 10


class Socket:
    """A plain TCP connection to a sender of its own: the least that loopback costs."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        if os.fork() == 0:
            connection, _ = listener.accept()
            payload = memoryview(bytes(NBYTES))
            while request := connection.recv(8):
                connection.sendall(payload[: int.from_bytes(request, "little")])
            os._exit(0)
        self._connection = socket.create_connection(listener.getsockname())
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def pull(self, into: memoryview) -> None:
        self._connection.sendall(len(into).to_bytes(8, "little"))
        got = 0
        while got < len(into):
            got += self._connection.recv_into(into[got:])


async def measure(rounds: int) -> dict[str, list[float]]:
    """Seconds of each way, `rounds` times, interleaved."""
    plain = Socket()  # forks: before Mooncake and its threads exist
    engine = Engine(TransferConfig(), "f00d", epoch=1)
    engine.start()
    here, other = Memory(NBYTES), Memory(NBYTES)
    engine.register(here.address, NBYTES, here)
    peer = PeerProcess(seed=1)
    view, source = memoryview(here.bytes), memoryview(other.bytes)

    def pull(*pieces: tuple[int, int, int]) -> Callable[[], Awaitable[object]]:
        parts = [Piece(here.address + to, peer.address + at, n) for to, at, n in pieces]
        return lambda: engine.read(peer.peer, "f00d", parts, here, 60.0)

    def copy(nbytes: int) -> None:
        view[:nbytes] = source[:nbytes]

    blocks = NBYTES // 2 // BLOCK
    scattered = [(i * BLOCK, (blocks - 1 - i) * BLOCK, BLOCK) for i in range(blocks)]
    neighbours = [(i * BLOCK, i * BLOCK, BLOCK) for i in range(blocks)]
    ways: dict[str, Callable[[], Awaitable[object] | None]] = {}
    for name, nbytes in (("64 KiB", BLOCK), ("1 MiB", MIB), ("64 MiB", NBYTES)):
        ways[f"{name} memcpy"] = lambda n=nbytes: copy(n)  # type: ignore[misc]
        ways[f"{name} socket"] = lambda n=nbytes: plain.pull(view[:n])  # type: ignore[misc]
        ways[f"{name} pull"] = pull((0, 0, nbytes))
        ways[f"{name} checksum"] = lambda n=nbytes: checksum_at(here.address, n) and None  # type: ignore[misc]
    ways[f"32 MiB in {blocks} scattered blocks, pull"] = pull(*scattered)
    ways[f"32 MiB in {blocks} neighbouring blocks, pull"] = pull(*neighbours)

    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            if (waiting := way()) is not None:
                await waiting
            seconds[name].append(time.perf_counter() - start)
    peer.kill()
    await engine.close()
    return seconds


def show(seconds: dict[str, list[float]]) -> None:
    for name, times in seconds.items():
        median = statistics.median(times)
        line = f"{name:40s} median {median * 1e3:8.2f} ms   min {min(times) * 1e3:8.2f} ms"
        if name.endswith("pull") and (base := seconds.get(name.replace(" pull", " socket"))):
            line += f"   {median / statistics.median(base):.2f} x socket"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="all times, in seconds")
    arguments = parser.parse_args()
    seconds = asyncio.run(measure(arguments.rounds))
    if arguments.json:
        print(json.dumps(seconds))
    else:
        show(seconds)


if __name__ == "__main__":
    main()
