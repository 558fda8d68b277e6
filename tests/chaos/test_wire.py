"""The slow cable is as slow and as lossy as it says, or the runs over it prove nothing."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.chaos.wire import Wire
from tests.netns import Node, Unavailable, open_network
from tests.waiting import LIMIT_S


@pytest.fixture
def wired() -> Iterator[tuple[Node, Wire]]:
    with open_network() as network:
        node = network.node("far", [])
        try:
            wire = Wire(network, node)
        except Unavailable as reason:
            pytest.skip(f"no user-space cable here: {reason}")
        try:
            network.shape(wire.link, "1gbit")
            yield node, wire
        finally:
            wire.close()


ECHO = """
import socket, sys
found = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
found.bind((sys.argv[1], 9))
print("ready", flush=True)
while True:
    found.sendto(*found.recvfrom(100))
"""


@pytest.fixture
def echo(wired: tuple[Node, Wire]) -> Iterator[socket.socket]:
    """A socket whose datagrams come back from the node."""
    node, _ = wired
    command = node.command([sys.executable, "-c", ECHO, node.address])
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here:
            here.connect((node.address, 9))
            ping(here, 1)  # the neighbours find each other
            yield here
    finally:
        process.kill()
        process.wait()


def ping(here: socket.socket, count: int, silence_s: float = LIMIT_S) -> tuple[float, float]:
    """(share of datagrams that did not come back before it was silent for so long, shortest
    round trip in ms)"""
    sent: dict[int, float] = {}
    times: list[float] = []
    for number in range(count):
        sent[number] = time.monotonic()
        here.send(number.to_bytes(4))
        time.sleep(0.001)
    here.settimeout(silence_s)
    try:
        while len(times) < count:
            number = int.from_bytes(here.recv(100))
            times.append((time.monotonic() - sent.pop(number)) * 1e3)
    except TimeoutError:
        pass
    return 1 - len(times) / count, min(times)


def test_delay_and_loss(wired: tuple[Node, Wire], echo: socket.socket) -> None:
    _, wire = wired
    lost, quick_ms = ping(echo, 50)
    assert lost == 0
    wire.set(30.0, 0.0)
    lost, slow_ms = ping(echo, 50)
    assert lost == 0
    assert slow_ms >= 60.0 > quick_ms
    wire.set(0.0, 0.2)
    lost, _ = ping(echo, 300, silence_s=2.0)
    assert 0.2 < lost < 0.55, "0.2 each way is 0.36 of the round trips"
    wire.set(0.0, 0.0)
    assert ping(echo, 50)[0] == 0
