"""The wall around Mooncake's ports, on sockets of our own: who gets in."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator

import pytest

from epd.errors import EpdError
from epd.transfer.interfaces import interface_of
from epd.transfer.wall import Wall, listening_ports, sockets_of

LOOPBACK = socket.if_nametoindex("lo")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Listens on all interfaces, as Mooncake does."""
    with socket.create_server(("", 0)) as found:
        yield found


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def gets_in(listener: socket.socket, target: str, source: str = "") -> bool:
    with socket.socket() as client:
        client.settimeout(0.3)
        if source:
            client.bind((source, 0))
        try:
            client.connect((target, port_of(listener)))
            client.sendall(b"x")
            accepted, _ = listener.accept()
            with accepted:
                accepted.settimeout(0.3)
                return accepted.recv(1) == b"x"
        except TimeoutError:
            return False


def test_only_packets_to_the_host_get_in(listener: socket.socket) -> None:
    assert gets_in(listener, "127.0.0.2")
    Wall.around("127.0.0.1", ()).put_around({port_of(listener)})
    assert gets_in(listener, "127.0.0.1")
    assert not gets_in(listener, "127.0.0.2")


def test_only_peers_of_the_networks_get_in(listener: socket.socket) -> None:
    Wall.around("127.0.0.1", ("127.0.0.0/30", "127.0.0.16/32")).put_around({port_of(listener)})
    for source, expected in {
        "127.0.0.3": True,
        "127.0.0.4": False,
        "127.0.0.15": False,
        "127.0.0.16": True,
        "127.0.0.17": False,
    }.items():
        assert gets_in(listener, "127.0.0.1", source) is expected, source


def test_most_networks_that_the_configuration_takes(listener: socket.socket) -> None:
    networks = tuple(f"127.0.{number}.0/24" for number in range(64))
    Wall.around("127.0.0.1", networks).put_around({port_of(listener)})
    for source, expected in {"127.0.0.9": True, "127.0.63.9": True, "127.0.64.9": False}.items():
        assert gets_in(listener, "127.0.0.1", source) is expected, source


def test_only_packets_through_the_interface_get_in(listener: socket.socket) -> None:
    host = ipaddress.ip_address("127.0.0.1")
    Wall(host, frozenset({LOOPBACK + 1000})).put_around({port_of(listener)})
    assert not gets_in(listener, "127.0.0.1")
    Wall(host, frozenset({LOOPBACK + 1000, LOOPBACK})).put_around({port_of(listener)})
    assert gets_in(listener, "127.0.0.1")


def test_connections_from_before_the_wall_are_cut_off_too() -> None:
    with socket.create_server(("", 0)) as listener, socket.socket() as client:
        client.connect(("127.0.0.2", port_of(listener)))
        accepted, _ = listener.accept()
        with accepted:
            accepted.settimeout(0.3)
            client.sendall(b"a")
            assert accepted.recv(1) == b"a"
            Wall.around("127.0.0.1", ()).put_around({port_of(listener)})
            client.sendall(b"b")
            with pytest.raises(TimeoutError):
                accepted.recv(1)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_ipv4_and_ipv6_on_one_socket() -> None:
    for host, other, family in (
        ("127.0.0.1", "::1", socket.AF_INET6),
        ("::1", "127.0.0.1", socket.AF_INET),
    ):
        server = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        with server, socket.create_connection((host, port_of(server)), timeout=1):
            Wall.around(host, ()).put_around({port_of(server)})
            with socket.create_connection((host, port_of(server)), timeout=1):
                pass
            with socket.socket(family) as stranger:
                stranger.settimeout(0.3)
                with pytest.raises(TimeoutError):
                    stranger.connect((other, port_of(server)))


def test_finds_the_sockets_of_this_process_by_port(listener: socket.socket) -> None:
    assert port_of(listener) in listening_ports()
    with sockets_of({port_of(listener)}) as found:
        assert {one.getsockname() for one in found} == {listener.getsockname()}
    listener.getsockname()  # still open: only the second handle was closed


def test_interfaces() -> None:
    assert interface_of(ipaddress.ip_address("127.0.0.1")) == LOOPBACK
    assert interface_of(ipaddress.ip_address("127.1.2.3")) == LOOPBACK
    assert interface_of(ipaddress.ip_address("192.0.2.255")) is None


@pytest.mark.parametrize(
    ("host", "networks", "param"),
    [
        ("127.0.0.1", ("10.0.0.1/24",), "transfer.networks"),
        ("127.0.0.1", ("nonsense",), "transfer.networks"),
        ("127.0.0.1", ("fd00::/8",), "transfer.networks"),
        ("no.such.host.invalid", (), "transfer.host"),
    ],
)
def test_what_can_not_be_read_is_named(host: str, networks: tuple[str, ...], param: str) -> None:
    with pytest.raises(EpdError) as caught:
        Wall.around(host, networks)
    assert caught.value.param == param
