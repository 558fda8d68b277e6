"""Networks that a test can cut: Linux namespaces joined by switches.

::

    host (the tests) ──┐ 198.18.x.1
                       │            hub: a namespace that holds the switches
    node "gateway" ────┤ lan
    node "prefill" ────┤ ───── data: another switch, if asked for
    node "decode"  ────┘

    with open_network() as network:
        prefill = network.node("prefill")
        subprocess.Popen(prefill.command([...]))      # runs there; listens on prefill.address
        network.cut(prefill.link())                   # the cable is out; nobody is told
        network.heal(prefill.link())

A cut is silent, as a cable pulled at the switch is: no reset and no ICMP, packets vanish
both ways and connections stay open. `separate` does the same between two nodes alone.

Everything is a child of named namespaces (``epd-<pid>-<start>-...``): removing those
removes the switches and cables as well. What a killed run left is removed by the next.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

LAN = "lan"
_NAMESPACES = Path("/run/netns")
# RFC 2544's range for tests of networks: no real network has these addresses.
_SUBNETS = [f"198.{18 + number // 256}.{number % 256}" for number in range(512)]
_NOBODY = "02:00:00:00:00:fe"
"""A hardware address that no interface has: frames for it arrive nowhere."""
_numbers = itertools.count()
# Classic BPF, as tc writes it: code, jump if true, jump if false, operand.
_LOAD_RANDOM = f"32 0 0 {0xFFFFF000 + 56}"
_IF_AT_LEAST = "53 0 1"
_SEGMENTS = 65535
_DROP, _PASS = "6 0 0 2", f"6 0 0 {0xFFFFFFFF}"


class Unavailable(Exception):
    """This machine doesn't let us make networks; the text says why."""


@dataclass(frozen=True, slots=True)
class Link:
    """The cable between a node and a switch."""

    namespace: str
    interface: str
    """In the node's namespace."""
    port: str
    """The switch's end, in the hub."""
    address: str


@dataclass(slots=True)
class Node:
    """A machine of the network."""

    name: str
    namespace: str
    links: dict[str, Link] = field(default_factory=dict)

    def link(self, switch: str = LAN) -> Link:
        return self.links[switch]

    @property
    def address(self) -> str:
        """Where others reach it over the LAN."""
        return self.link().address

    def command(self, line: Sequence[str]) -> list[str]:
        """The command that runs `line` in this node. It replaces itself by `line`: the
        process id, the parent and the standard streams are the program's own."""
        return ["nsenter", f"--net={self._file}", "--", *line]

    def module(self, line: Sequence[str]) -> list[str]:
        """The same for ``[python, "-m", module, *arguments]``, as a line that fork servers
        take, too."""
        python, option, *rest = line
        assert option == "-m", line
        return [python, option, "tests.in_node", self._file, *rest]

    @property
    def _file(self) -> str:
        return str(_NAMESPACES / self.namespace)


class Network:
    """Switches and nodes; `close` removes all of it. Use `open_network` in tests.

    Args:
        switches: the LAN, which the tests themselves are on, and others, which they aren't.

    Raises:
        Unavailable: no rights, no tools, or a kernel without bridges or veth.
    """

    def __init__(self, switches: Sequence[str] = (LAN,)) -> None:
        _require_tools()
        remove_stale()
        number = next(_numbers)
        self.prefix = f"{_mark(os.getpid())}-{number}"
        """Of all its namespaces' names."""
        self._hub = f"{self.prefix}-hub"
        self._host = f"epd{os.getpid()}n{number}"
        self._subnets = dict(zip(switches, _free_subnets(len(switches)), strict=True))
        self._hosts = {switch: itertools.count(2) for switch in switches}
        self._ports = itertools.count()
        self._made: list[str] = []
        self._lossy: set[Link] = set()
        try:
            self._namespace(self._hub)
            for switch in switches:
                _ip(self._hub, f"link add {switch} type bridge stp_state 0 mcast_snooping 0")
                _ip(self._hub, f"link set {switch} up")
            self._attach_host(switches[0])
        except Unavailable:
            self.close()
            raise

    def node(self, name: str, switches: Sequence[str] | None = None) -> Node:
        """A new machine on these switches; default: all."""
        node = Node(name, f"{self.prefix}-{name}")
        self._namespace(node.namespace)
        for switch in switches if switches is not None else self._subnets:
            node.links[switch] = self._attach(node.namespace, switch)
        return node

    def cut(self, link: Link) -> None:
        """Pull the cable out of the switch."""
        _ip(self._hub, f"link set {link.port} down")

    def heal(self, link: Link) -> None:
        _ip(self._hub, f"link set {link.port} up")

    def separate(self, one: Link, other: Link) -> None:
        """Nothing passes between these two any more; both still reach all others."""
        for here, there in ((one, other), (other, one)):
            neighbour = f"{there.address} lladdr {_NOBODY} dev {here.interface} nud permanent"
            _ip(here.namespace, f"neigh replace {neighbour}")

    def unite(self, one: Link, other: Link) -> None:
        """End `separate`."""
        for here, there in ((one, other), (other, one)):
            _ip(here.namespace, f"neigh del {there.address} dev {here.interface}")

    def received(self, link: Link) -> int:
        """Bytes that came to the node over this cable so far."""
        (shown,) = json.loads(_ip(link.namespace, f"-s -j link show {link.interface}"))
        return int(shown["stats64"]["rx"]["bytes"])

    def close(self) -> None:
        """Remove everything; processes that still run in a node lose their network."""
        # The kernel takes namespaces down later: the host's end goes at once, its route too.
        subprocess.run(["ip", "link", "del", self._host], capture_output=True, timeout=20)
        while self._made:
            _ip(None, f"netns del {self._made.pop()}")

    def _namespace(self, name: str) -> None:
        _ip(None, f"netns add {name}")
        self._made.append(name)
        _ip(name, "link set lo up")

    def _attach(self, namespace: str, switch: str) -> Link:
        link = self._reserve(namespace, switch)
        ends = f"{link.port} type veth peer name {switch} netns {namespace}"
        _ip(self._hub, f"link add {ends}")
        self._connect(link, switch)
        return link

    def attach_taps(self, node: Node, ends: tuple[str, str], switch: str = LAN) -> Link:
        """A cable of two TAP devices of this namespace; whoever opened them carries frames
        from one to the other, as late as it likes, or not at all."""
        link = self._reserve(node.namespace, switch)
        _ip(None, f"link set {ends[0]} netns {self._hub} name {link.port}")
        _ip(None, f"link set {ends[1]} netns {node.namespace} name {switch}")
        self._connect(link, switch)
        node.links[switch] = link
        return link

    def shape(self, link: Link, rate: str) -> None:
        """Let no more than `rate` ("1gbit") out of a node, by tc's token bucket."""
        line = f"qdisc replace dev {link.interface} root tbf rate {rate} burst 256k latency 100ms"
        _tc(link, line)

    def lose(self, link: Link, share: float) -> None:
        """Drop this share of the packets that leave a node, drawn by the kernel; 0: none.

        A classic BPF filter of tc: "drop if a random word is large enough". Kernels have it
        more often than netem. Packets are those of the wire, not what the kernel makes of
        many (segmentation offload).
        """
        most = 1 if share else _SEGMENTS
        _ip(link.namespace, f"link set {link.interface} gso_max_segs {most}")
        if link in self._lossy:
            self._lossy.remove(link)
            _tc(link, f"qdisc del dev {link.interface} clsact")
        if share:
            self._lossy.add(link)
            _tc(link, f"qdisc add dev {link.interface} clsact")
            least = round((1 - share) * 2**32)
            program = f"{_LOAD_RANDOM},{_IF_AT_LEAST} {least},{_DROP},{_PASS}"
            place = f"filter add dev {link.interface} egress bpf direct-action bytecode"
            _tc(link, place, f"4,{program}")

    def resent(self, link: Link) -> int:
        """TCP segments that the node had to send again so far."""
        shown = ["nsenter", f"--net={_NAMESPACES / link.namespace}", "cat", "/proc/net/snmp"]
        names, values = (line.split() for line in _run(shown).splitlines() if line[:4] == "Tcp:")
        return int(values[names.index("RetransSegs")])

    def _reserve(self, namespace: str, switch: str) -> Link:
        address = f"{self._subnets[switch]}.{next(self._hosts[switch])}"
        return Link(namespace, switch, f"port{next(self._ports)}", address)

    def _connect(self, link: Link, switch: str) -> None:
        self._plug(link.port, switch)
        _ip(link.namespace, f"address add {link.address}/24 dev {switch}")
        _ip(link.namespace, f"link set {switch} up")

    def _attach_host(self, switch: str) -> None:
        _ip(None, f"link add {self._host} type veth peer name host netns {self._hub}")
        self._plug("host", switch)
        _ip(None, f"address add {self._subnets[switch]}.1/24 dev {self._host}")
        _ip(None, f"link set {self._host} up")

    def _plug(self, port: str, switch: str) -> None:
        _ip(self._hub, f"link set {port} master {switch}")
        _ip(self._hub, f"link set {port} up")


@contextmanager
def open_network(switches: Sequence[str] = (LAN,)) -> Iterator[Network]:
    """A network for a test; skips the test, visibly, where the machine doesn't allow one."""
    try:
        network = Network(switches)
    except Unavailable as reason:
        pytest.skip(f"no network namespaces here: {reason}")
    try:
        yield network
    finally:
        network.close()


def remove_stale() -> None:
    """Remove the namespaces of runs whose process has ended without removing them."""
    for name in existing():
        mark = re.match(r"epd-(\d+)-\d+", name)
        if mark and mark[0] != _mark(int(mark[1])):
            # Another run may be doing the same.
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


def existing() -> list[str]:
    """Names of all namespaces of this machine."""
    try:
        return [path.name for path in _NAMESPACES.iterdir()]
    except FileNotFoundError:
        return []


def _mark(pid: int) -> str:
    """Names one life of a process id."""
    try:
        return f"epd-{pid}-{int(psutil.Process(pid).create_time() * 100)}"
    except psutil.NoSuchProcess:
        return f"epd-{pid}-gone"


def _free_subnets(wanted: int) -> list[str]:
    """Others than those that this machine routes; by process id, so that runs side by
    side don't choose the same."""
    routes = subprocess.run(["ip", "-4", "route"], capture_output=True, text=True, timeout=20)
    start = os.getpid() * 7 % len(_SUBNETS)
    turned = _SUBNETS[start:] + _SUBNETS[:start]
    return [subnet for subnet in turned if f"{subnet}." not in routes.stdout][:wanted]


def _require_tools() -> None:
    if os.geteuid() != 0:
        raise Unavailable("needs root")
    for tool in ("ip", "nsenter"):
        if shutil.which(tool) is None:
            raise Unavailable(f"{tool} is not installed")


def _ip(namespace: str | None, arguments: str) -> str:
    return _run(["ip", *(["-n", namespace] if namespace else []), *arguments.split()])


def _tc(link: Link, arguments: str, *more: str) -> None:
    _run(["tc", "-n", link.namespace, *arguments.split(), *more])


def _run(line: Sequence[str]) -> str:
    # Ctrl-C is for whoever asks: it ends in order, with these commands done.
    done = subprocess.run(line, capture_output=True, text=True, timeout=20, process_group=0)
    if done.returncode:
        raise Unavailable(f"{' '.join(line)}: {done.stderr.strip()}")
    return done.stdout
