"""Which IP addresses are the public internet. Pure."""

from __future__ import annotations

from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
)

Address = IPv4Address | IPv6Address

# IANA's special-purpose registries, and multicast. Written out, for `is_global` differs
# between Python's releases; an address must pass both.
_CLOSED_4 = tuple(
    map(
        IPv4Network,
        (
            "0.0.0.0/8",
            "10.0.0.0/8",
            "100.64.0.0/10",
            "127.0.0.0/8",
            "169.254.0.0/16",
            "172.16.0.0/12",
            "192.0.0.0/24",
            "192.0.2.0/24",
            "192.88.99.0/24",
            "192.168.0.0/16",
            "198.18.0.0/15",
            "198.51.100.0/24",
            "203.0.113.0/24",
            "224.0.0.0/3",
        ),
    )
)
_GLOBAL_6 = IPv6Network("2000::/3")
_CLOSED_6 = tuple(
    map(IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20", "5f00::/16"))
)
_NAT64 = IPv6Network("64:ff9b::/96")


def is_public(address: Address) -> bool:
    """Whether anyone on the internet could reach this address, and not only we.

    IPv6 forms that carry an IPv4 address (mapped, NAT64) are judged by that one. Tunnels
    (6to4, Teredo) and everything outside IANA's global unicast range are not public.
    """
    if isinstance(address, IPv4Address):
        return address.is_global and not any(address in net for net in _CLOSED_4)
    if address.scope_id is not None:
        return False
    inner = address.ipv4_mapped
    if inner is None and address in _NAT64:
        inner = IPv4Address(int(address) & 0xFFFFFFFF)
    if inner is not None:
        return is_public(inner)
    if address not in _GLOBAL_6 or any(address in net for net in _CLOSED_6):
        return False
    return address.is_global


def parse_literal(host: str) -> Address | None:
    """The address that `host` (no brackets) spells, or None for a name.

    Raises:
        ValueError: it is a number in a spelling that programs read differently (``127.1``,
            ``0x7f000001``, ``2130706433``, ``017700000001``), or no address at all.
    """
    if ":" in host:
        address = ip_address(host)
        if "%" in host:
            raise ValueError("an address with a zone")
        return address
    last = host.rstrip(".").rpartition(".")[2]
    # As in the URL standard: a host whose last label is a number is an IPv4 address.
    if not (last.isdigit() or last.lower().startswith("0x")):
        return None
    return IPv4Address(host)
