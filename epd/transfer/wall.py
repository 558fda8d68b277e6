"""A wall around Mooncake's ports: they listen everywhere, and ask nobody who they are.

Mooncake can't be told to listen on one address. But its sockets are this process's, and
Linux lets a process put a filter on its own sockets (SO_ATTACH_FILTER; some kernels want
CAP_NET_ADMIN for that): packets are dropped before TCP sees them unless they

- were sent to `transfer.host`,
- came in through the interface that has this address (or over loopback, from this machine),
- and come from one of `transfer.networks`, if any are given.

A dropped SYN gets no answer, as behind a firewall. Accepted connections inherit the filter.
It is no authentication: a neighbour on the same network still gets in.
"""

from __future__ import annotations

import ctypes
import ipaddress
import logging
import os
import socket
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from epd.errors import invalid
from epd.transfer.interfaces import Address, interface_of

log = logging.getLogger("epd.transfer")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand

_ATTACH = 26  # SO_ATTACH_FILTER
_INSTRUCTION = struct.Struct("=HBBI")
# linux/filter.h: classic BPF. Negative offsets reach the IP header and the interface.
_LOAD_WORD, _LOAD_BYTE = 0x20, 0x30
_AND, _EQUAL, _RETURN = 0x54, 0x15, 0x06
_IP_HEADER, _INTERFACE = 0xFFF00000, 0xFFFFF000 + 8
_WHOLE = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Wall:
    """Who may talk to the engine's ports."""

    host: Address
    interfaces: frozenset[int]
    """Indices; empty: any (the address is another machine's, e.g. a mapped port)."""
    networks: tuple[Network, ...] = ()
    """Of peers; empty: any."""

    @classmethod
    def around(cls, host: str, networks: Sequence[str]) -> Wall:
        """
        Raises:
            EpdError: a network can't be read, or is of another IP version than the host.
        """
        address = _resolve(host)
        parsed = tuple(_network(text, address.version) for text in networks)
        index = interface_of(address)
        if index is None:
            log.warning("transfer.host %s is no address of this machine: any interface", host)
            return cls(address, frozenset(), parsed)
        return cls(address, frozenset({index, socket.if_nametoindex("lo")}), parsed)

    def put_around(self, ports: set[int]) -> None:
        """Filter all of this process's sockets with these local ports.

        Raises:
            EpdError: the kernel doesn't let us, and `transfer.networks` asks for it.
        """
        try:
            with sockets_of(ports) as found:
                self.attach(found)
        except OSError as error:
            if self.networks:
                reason = f"transfer.networks: this kernel takes no socket filters: {error.strerror}"
                raise invalid(reason, "transfer.networks") from error
            log.warning("no wall around ports %s: %s", sorted(ports), error.strerror)

    def attach(self, sockets: Sequence[socket.socket]) -> None:
        """Filter what reaches these sockets from now on."""
        program = self.program()
        code = b"".join(_INSTRUCTION.pack(*instruction) for instruction in program)
        buffer = ctypes.create_string_buffer(code, len(code))
        option = struct.pack("@HP", len(program), ctypes.addressof(buffer))
        for one in sockets:
            one.setsockopt(socket.SOL_SOCKET, _ATTACH, option)

    def program(self) -> list[Instruction]:
        """Checks one after another; each goes on to the next, or drops the packet."""
        version = 4 if self.host.version == 4 else 6
        source, target = (12, 16) if version == 4 else (8, 24)
        checks = [_one_of([[(_LOAD_BYTE, 0, 0xF0, version << 4)]])]
        # The address of a mapped port is not what arrives here.
        if self.interfaces:
            checks.append(_one_of([_words(target, self.host.packed, b"\xff" * 16)]))
            choices = [[(_LOAD_WORD, _INTERFACE, _WHOLE, i)] for i in sorted(self.interfaces)]
            checks.append(_one_of(choices))
        if self.networks:
            nets = [
                _words(source, n.network_address.packed, n.netmask.packed) for n in self.networks
            ]
            checks.append(_one_of(nets))
        return [*(part for check in checks for part in check), (_RETURN, 0, 0, _WHOLE)]


Test = tuple[int, int, int, int]
"""(load, offset in the IP header or `_INTERFACE`, mask, value that is wanted)"""


def _words(offset: int, value: bytes, mask: bytes) -> list[Test]:
    """An address, compared 32 bits at a time."""
    tests = []
    for at in range(0, len(value), 4):
        wanted = int.from_bytes(value[at : at + 4])
        tests.append((_LOAD_WORD, offset + at, int.from_bytes(mask[at : at + 4]), wanted))
    return tests


def _one_of(choices: Sequence[Sequence[Test]]) -> list[Instruction]:
    """Code that falls through if all tests of one choice hold, and drops the packet else."""
    blocks: list[list[Instruction]] = []
    after = 1  # instructions from a block's end to the code behind it: the return
    for choice in reversed(choices):
        block: list[Instruction] = []
        for number, (load, offset, mask, wanted) in enumerate(choice):
            last = number == len(choice) - 1
            place = offset if offset == _INTERFACE else _IP_HEADER + offset
            behind = 3 * (len(choice) - number - 1)
            block += [
                (load, 0, 0, place),
                (_AND, 0, 0, mask),
                (_EQUAL, behind + after if last else 0, behind, wanted),
            ]
        blocks.insert(0, block)
        after += len(block)
    return [*(part for block in blocks for part in block), (_RETURN, 0, 0, 0)]


@contextmanager
def sockets_of(ports: set[int]) -> Iterator[list[socket.socket]]:
    """This process's TCP sockets with these local ports, whoever opened them; borrowed."""
    found: list[socket.socket] = []
    try:
        for name in os.listdir("/proc/self/fd"):
            if (one := _tcp_socket(int(name))) is None:
                continue
            found.append(one)
            if one.getsockname()[1] not in ports:
                found.pop().close()
        yield found
    finally:
        for one in found:
            one.close()


def listening_ports() -> set[int]:
    """Local ports that this process listens on."""
    ports = set()
    for name in os.listdir("/proc/self/fd"):
        if (one := _tcp_socket(int(name))) is not None:
            with one:
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    ports.add(int(one.getsockname()[1]))
    return ports


def _tcp_socket(number: int) -> socket.socket | None:
    """A second handle of an open file, if it is a TCP socket."""
    try:
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return None
        one = socket.socket(fileno=os.dup(number))
    except OSError:  # closed meanwhile
        return None
    if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
        return one
    one.close()
    return None


def _resolve(host: str) -> Address:
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise invalid(f"transfer.host: {host}: {error.strerror}", "transfer.host") from error
    return ipaddress.ip_address(str(found[0][4][0]).partition("%")[0])


def _network(text: str, version: int) -> Network:
    try:
        network = ipaddress.ip_network(text)
    except ValueError as error:
        raise invalid(f"transfer.networks: {error}", "transfer.networks") from error
    if network.version != version:
        reason = f"transfer.networks: {text} is not of transfer.host's IP version"
        raise invalid(reason, "transfer.networks")
    return network
