"""What the machine is, and how busy it is: written beside every figure. Linux; elsewhere
the figures are missing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TICKS = os.sysconf("SC_CLK_TCK")
_PACKAGES = ("torch", "transformers", "aiohttp", "grpcio", "numpy")


def environment() -> dict[str, Any]:
    """Machine and versions; no names of users or machines."""
    from epd import __version__

    versions = {"epd": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.machine()}",
        "load average": [round(load, 2) for load in os.getloadavg()],
        "versions": versions,
    }


def _cpu_model() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


@dataclass(frozen=True, slots=True)
class Usage:
    """Cores in use on average over a time."""

    client: float
    server: float | None
    """The processes given; None without any."""
    others: float | None
    """Everything else on the machine (it includes a server whose pid isn't known)."""


class Meter:
    """CPU use between `__init__` and `read`. `pids`: servers, with all their children."""

    def __init__(self, pids: tuple[int, ...] = ()) -> None:
        self._pids = pids
        self._start = self._now()

    def _now(self) -> tuple[float, float, float, float]:
        return time.monotonic(), time.process_time(), tree_seconds(self._pids), busy_seconds()

    def read(self) -> Usage:
        wall, client, server, busy = (b - a for a, b in zip(self._start, self._now(), strict=True))
        wall = max(wall, 1e-9)
        others = max(0.0, busy - client - server) / wall if busy > 0 else None
        return Usage(client / wall, server / wall if self._pids else None, others)


def busy_seconds() -> float:
    """CPU seconds that the whole machine has worked since it started; 0: not known."""
    fields = _read("/proc/stat").partition("\n")[0].split()[1:9]
    ticks = [int(field) for field in fields]
    return (sum(ticks) - ticks[3] - ticks[4]) / _TICKS if ticks else 0.0


def tree_seconds(pids: tuple[int, ...]) -> float:
    """CPU seconds of these processes and all that descend from them."""
    if not pids:
        return 0.0
    children: dict[int, list[int]] = defaultdict(list)
    used: dict[int, float] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        fields = _read(entry).rpartition(")")[2].split()
        if len(fields) > 12:
            pid = int(entry.parent.name)
            children[int(fields[1])].append(pid)
            used[pid] = (int(fields[11]) + int(fields[12])) / _TICKS
    total, waiting, seen = 0.0, list(pids), set[int]()
    while waiting:
        pid = waiting.pop()
        if pid not in seen:
            seen.add(pid)
            total += used.get(pid, 0.0)
            waiting += children[pid]
    return total


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
