"""A cable that delays and loses frames, in user space: not every kernel has netem.

Two TAP devices, one plugged into the switch and one in the node; a process of its own
carries frames between them. ``python -m tests.chaos.wire SWITCH_END NODE_END`` is that
process: it makes the devices, says so on stdout, and takes "DELAY_MS LOSS" lines on stdin.
"""

from __future__ import annotations

import fcntl
import os
import random
import selectors
import struct
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

from tests.netns import LAN, Link, Network, Node, Unavailable

ROOT = Path(__file__).resolve().parents[2]
_SETIFF, _TAP_WITHOUT_HEADER = 0x400454CA, 0x0002 | 0x1000
_FRAME = 1 << 16
_QUEUE = 4096
"""Frames on their way; more are dropped, as a full switch does."""


class Wire:
    """The cable of a node that has no other; `close` ends it (before the network).

    Raises:
        Unavailable: this machine has no TAP devices.
    """

    def __init__(self, network: Network, node: Node, switch: str = LAN) -> None:
        if not os.path.exists("/dev/net/tun"):
            raise Unavailable("no /dev/net/tun")
        name = f"e{os.getpid() % 100000}{len(node.name)}{node.name[-1]}"
        ends = (f"{name}s", f"{name}n")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.wire", *ends],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            process_group=0,  # Ctrl-C is for whoever started this, not for a cable
        )  # fmt: skip
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            self._process.wait(5)
            raise Unavailable("can't make TAP devices")
        self.link: Link = network.attach_taps(node, ends, switch)

    def set(self, delay_ms: float, loss: float) -> None:
        """Each way; a new delay holds for frames to come."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{delay_ms} {loss}\n")
        self._process.stdin.flush()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def _open(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _SETIFF, struct.pack("16sH", name.encode(), _TAP_WITHOUT_HEADER))
    return device


class _Carrier:
    """Frames of both directions."""

    def __init__(self, one: int, other: int) -> None:
        self.delay_s, self.loss = 0.0, 0.0
        self._ways = {one: other, other: one}
        self._late: deque[tuple[float, int, bytes]] = deque()
        self._random = random.Random(0)

    def take(self, device: int) -> None:
        """All frames that wait at one end."""
        while True:
            try:
                frame = os.read(device, _FRAME)
            except BlockingIOError:
                return
            if self._random.random() < self.loss or len(self._late) >= _QUEUE:
                continue
            if self.delay_s or self._late:
                self._late.append((time.monotonic() + self.delay_s, self._ways[device], frame))
            else:
                _write(self._ways[device], frame)

    def deliver(self) -> float | None:
        """What is due; seconds until the next is."""
        now = time.monotonic()
        while self._late and self._late[0][0] <= now:
            _, device, frame = self._late.popleft()
            _write(device, frame)
        return max(0.0, self._late[0][0] - now) if self._late else None


def _write(device: int, frame: bytes) -> None:
    try:
        os.write(device, frame)
    except OSError:
        return  # the device is down: the cable is out


def main(switch_end: str, node_end: str) -> None:
    one, other = _open(switch_end), _open(node_end)
    print("ready", flush=True)
    carrier, selector = _Carrier(one, other), selectors.DefaultSelector()
    for source in (one, other, sys.stdin.fileno()):
        selector.register(source, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select(carrier.deliver()):
            if key.fd in (one, other):
                carrier.take(key.fd)
                continue
            line = os.read(key.fd, 100).decode().split("\n")[-2:-1]
            if not line:
                return  # the test is gone
            delay_ms, loss = map(float, line[0].split())
            carrier.delay_s, carrier.loss = delay_ms / 1e3, loss


if __name__ == "__main__":
    main(*sys.argv[1:])
