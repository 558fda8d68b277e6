"""Which interface of this machine has an address (rtnetlink(7), RTM_GETADDR)."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterator

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_ADDRESS = struct.Struct("=BBBBI")  # ifaddrmsg: family, prefix, flags, scope, interface
_ATTRIBUTE = struct.Struct("=HH")  # rtattr: length, type
_GET, _NEW, _DONE = 22, 20, 3
_REQUEST_DUMP = 0x301
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_BUFFER = 1 << 16


def interface_of(wanted: Address) -> int | None:
    """Index of the interface that has this address; None: it isn't this machine's."""
    for index, address in _addresses():
        if address == wanted:
            return index
    # All of 127/8 leads to the loopback, which lists one address of it.
    return socket.if_nametoindex("lo") if wanted.is_loopback else None


def _addresses() -> Iterator[tuple[int, Address]]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
        kernel.settimeout(5.0)
        length = _HEADER.size + _ADDRESS.size
        request = _HEADER.pack(length, _GET, _REQUEST_DUMP, 1, 0) + _ADDRESS.pack(0, 0, 0, 0, 0)
        kernel.sendto(request, (0, 0))
        while True:
            answer = kernel.recv(_BUFFER)
            while answer:
                length, kind, *_ = _HEADER.unpack_from(answer)
                if kind != _NEW:
                    assert kind == _DONE, f"netlink message {kind}"
                    return
                yield from _parse(answer[_HEADER.size : length])
                answer = answer[_aligned(length) :]


def _parse(message: bytes) -> Iterator[tuple[int, Address]]:
    *_, index = _ADDRESS.unpack_from(message)
    found: dict[int, bytes] = {}
    rest = message[_ADDRESS.size :]
    while len(rest) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(rest)
        found[kind] = rest[_ATTRIBUTE.size : length]
        rest = rest[_aligned(length) :]
    # On a point-to-point link IFA_ADDRESS is the other end.
    packed = found.get(_IFA_LOCAL) or found.get(_IFA_ADDRESS)
    if packed:
        yield index, ipaddress.ip_address(packed)


def _aligned(length: int) -> int:
    return (length + 3) & ~3
