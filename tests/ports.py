"""Ports to tell a process before it runs, or to come back to after its end.

A port that was free a moment ago may be somebody's by then: the kernel gives those of its
ephemeral range to every connection that anybody opens. So these are below that range, and
each process of a test run takes them from a stretch of its own.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator

_FIRST, _STRETCH, _STRETCHES = 21_000, 100, 110
_turn = itertools.count()


def _candidates() -> Iterator[int]:
    own = _FIRST + os.getpid() % _STRETCHES * _STRETCH
    for _ in range(_STRETCH * _STRETCHES):
        place = next(_turn)
        yield _FIRST + (own - _FIRST + place) % (_STRETCH * _STRETCHES)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def free_ports(count: int = 1) -> list[int]:
    """So many ports in a row that nobody uses."""
    found: list[int] = []
    for port in _candidates():
        if found and port != found[-1] + 1:
            found = []
        found = [*found, port] if _is_free(port) else []
        if len(found) == count:
            return found
    raise AssertionError(f"no {count} free ports")
