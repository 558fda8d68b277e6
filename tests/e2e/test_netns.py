"""The networks that tests cut: they carry, they cut silently, they leave nothing."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests import netns
from tests.e2e.cluster import ROOT
from tests.netns import Link, Network, Node, open_network
from tests.waiting import LIMIT_S

ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 7))
print("listening", flush=True)
while True:
    peer, _ = server.accept()
    while data := peer.recv(100):
        peer.sendall(data)
"""
DIAL = """
import socket, sys
try:
    peer = socket.create_connection((sys.argv[1], 7), timeout=0.5)
    peer.sendall(b"hello")
    print(peer.recv(5).decode())
except OSError as error:
    print(type(error).__name__)
"""


@pytest.fixture
def network() -> Iterator[Network]:
    with open_network(["lan", "data"]) as network:
        yield network


@pytest.fixture
def echo(network: Network) -> Iterator[Node]:
    """A node that sends back what it gets, on all its addresses."""
    node = network.node("echo")
    program = node.command([sys.executable, "-c", ECHO, "0.0.0.0"])
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "listening\n"
        yield node
        server.kill()


def dial(node: Node, target: Link) -> str:
    program = node.command([sys.executable, "-c", DIAL, target.address])
    return subprocess.run(program, capture_output=True, text=True, timeout=LIMIT_S).stdout.strip()


def test_a_cut_is_silent_and_heals(network: Network, echo: Node) -> None:
    with socket.create_connection((echo.address, 7), timeout=LIMIT_S) as peer:
        peer.sendall(b"one")
        assert peer.recv(10) == b"one"
        network.cut(echo.link())
        peer.settimeout(0.5)
        peer.sendall(b"two")
        with pytest.raises(TimeoutError):
            peer.recv(10)
        network.heal(echo.link())
        peer.settimeout(LIMIT_S)
        assert peer.recv(10) == b"two"  # the same connection: it was never told


def test_one_switch_is_cut_and_the_other_carries(network: Network, echo: Node) -> None:
    node = network.node("node")
    network.cut(echo.link("data"))
    assert dial(node, echo.link("data")) == "TimeoutError"
    assert dial(node, echo.link("lan")) == "hello"
    network.heal(echo.link("data"))
    assert dial(node, echo.link("data")) == "hello"


def test_two_nodes_are_separated_and_others_reach_both(network: Network, echo: Node) -> None:
    apart, beside = network.node("apart"), network.node("beside")
    network.separate(apart.link(), echo.link())
    assert dial(apart, echo.link()) == "TimeoutError"
    assert dial(beside, echo.link()) == "hello"
    network.unite(apart.link(), echo.link())
    assert dial(apart, echo.link()) == "hello"


ANSWER = """
import socket, sys
here = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
here.bind((sys.argv[1], 9))
print("ready", flush=True)
while True:
    here.sendto(*here.recvfrom(100))
"""


def test_packets_are_lost_as_often_as_said(network: Network) -> None:
    node = network.node("lossy")
    program = node.command([sys.executable, "-c", ANSWER, node.address])
    with (
        subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as far,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here,
    ):
        assert far.stdout is not None
        assert far.stdout.readline() == "ready\n"
        here.connect((node.address, 9))

        def lost(count: int, silence_s: float) -> float:
            """All are sent at once; those are lost that have not come when it is silent."""
            for _ in range(count):
                here.send(b"x")
            here.settimeout(silence_s)
            come = 0
            with suppress(TimeoutError):
                while come < count:
                    come += len(here.recv(10))
            return 1 - come / count

        assert lost(50, silence_s=LIMIT_S) == 0
        network.lose(node.link(), 0.5)
        assert 0.1 < lost(100, silence_s=2) < 0.9
        network.lose(node.link(), 0)
        assert lost(50, silence_s=LIMIT_S) == 0
        far.kill()


def test_nothing_is_left(network: Network) -> None:
    interfaces = len(socket.if_nameindex())
    network.node("node")
    assert len(left_of(network.prefix)) == 2
    network.close()
    assert left_of(network.prefix) == []
    assert len(socket.if_nameindex()) == interfaces - 1


def test_what_a_killed_run_left_is_removed_by_the_next(network: Network) -> None:
    program = (
        "import os, signal; from tests.netns import Network; n = Network(); n.node('lost');"
        "print(n.prefix, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    prefix = done.stdout.strip()
    assert len(left_of(prefix)) == 2
    netns.remove_stale()
    assert left_of(prefix) == []
    assert left_of(network.prefix) != []  # those of a living run stay


def left_of(prefix: str) -> list[str]:
    return [name for name in netns.existing() if name.startswith(prefix)]
