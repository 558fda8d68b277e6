"""Saying that this process serves: to whoever reads its output, and to systemd."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping

import orjson

NOTIFY_SOCKET = "NOTIFY_SOCKET"
"""Where systemd listens, for units with Type=notify."""


def announce(facts: Mapping[str, object]) -> None:
    """One line ``READY {json}`` on stdout; systemd, if it started this process, is told, too."""
    print(f"READY {orjson.dumps(dict(facts)).decode()}", flush=True)
    tell_systemd("READY=1")


def tell_systemd(state: str) -> None:
    """sd_notify(3); nothing where nobody listens."""
    name = os.environ.get(NOTIFY_SOCKET, "")
    if not name:
        return
    address = f"\0{name[1:]}" if name.startswith("@") else name
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to,
    ):
        to.connect(address)
        to.sendall(state.encode())
