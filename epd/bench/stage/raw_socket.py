"""A plain TCP connection to a sender of its own: the least that loopback costs.

    python -m epd.bench.stage.raw_socket NBYTES

is the sender: it prints its port, and sends as many bytes as each 8-byte request says, out
of memory like that of the peer that Mooncake reads from: touched, and unlike from page to
page. (Fresh zeroed memory is one page of zeros that never leaves the cache: 1.2 times as
fast, and no measure of anything.)
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from epd.bench.stage.peer import Memory, content


class Receiver:
    """The reading side."""

    def __init__(self, port: int) -> None:
        self._connection = socket.create_connection(("127.0.0.1", port))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def pull(self, into: memoryview) -> None:
        """Fill `into`."""
        self._connection.sendall(len(into).to_bytes(8, "little"))
        got = 0
        while got < len(into):
            count = self._connection.recv_into(into[got:])
            assert count, "the sender is gone"
            got += count

    def close(self) -> None:
        self._connection.close()


@contextmanager
def receiver(nbytes: int) -> Iterator[Receiver]:
    """Connected to a process of its own, which can send up to `nbytes` at once."""
    command = [sys.executable, "-m", __name__, str(nbytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        end = Receiver(int(process.stdout.readline()))
        try:
            yield end
        finally:
            end.close()
            process.wait(20)


def send(nbytes: int) -> None:
    """Until the receiver hangs up."""
    memory = Memory(nbytes)
    memory.bytes[:] = content(nbytes)
    payload = memoryview(memory.bytes)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while request := connection.recv(8):
            connection.sendall(payload[: int.from_bytes(request, "little")])


if __name__ == "__main__":
    send(int(sys.argv[1]))
