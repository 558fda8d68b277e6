"""Memory of a running `epd serve`, process by process, helpers included.

RSS counts shared pages in every process that has them, PSS in parts, USS not at all: the
forks of a helper share most of what they have, so their sum is rather the PSS.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from bench.loopback import get
from bench.service import Service
from epd.bench.report import markdown

_MIB = 1 << 20
_ENTRY = re.compile(r'"entry": "([\w.]+):')
_HEAD = ("process", "own weights MiB", "pools MiB", "RSS MiB", "beyond weights and pools MiB",
         "PSS MiB", "USS MiB")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Own:
    """What a stage says that it holds, in bytes."""

    weights: int = 0
    """Of its part, as they were loaded."""
    pools: int = 0
    """Registered memory: KV pool, and arenas for embeddings."""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Own:
        """From /debug/state; several stages of a process share weights and KV pool."""
        stages = list(state["stages"].values()) if "stages" in state else [state]
        kv = max((s.get("kv_blocks", 0) * s.get("kv_block_bytes", 0) for s in stages), default=0)
        lm = max((s.get("weights_bytes", 0) for s in stages if "kv_blocks" in s), default=0)
        vision = sum(s.get("weights_bytes", 0) for s in stages if "kv_blocks" not in s)
        return cls(lm + vision, kv + sum(s.get("arena_bytes", 0) for s in stages))


def memory(service: Service) -> str:
    """A table of all processes below the supervisor, and of that one itself."""
    parts = {pid: name for name, pid in service.pids.items()}
    rows = _rows("epd serve", psutil.Process(service.pid), None, parts)
    for name, pid in service.pids.items():
        rows += _rows(name, psutil.Process(pid), _own(service.metrics.get(name, "")), parts)
    return markdown(list(_HEAD), rows)


def _rows(
    name: str, process: psutil.Process, own: Own | None, parts: Mapping[int, str]
) -> list[list[str]]:
    """Of one process, and of its helpers."""
    rows = [_row(name, [process], own)]
    for helper, members in sorted(_helpers(process, parts).items()):
        what = f"{name}: {helper}" + (f" ({len(members)})" if len(members) > 1 else "")
        rows.append(_row(what, members, None))
    return rows


def _own(address: str) -> Own | None:
    if not address:
        return None
    with get(f"http://{address}/debug/state", 10) as reply:
        own = Own.of(json.load(reply))
    return own if own.weights else None


def _helpers(process: psutil.Process, parts: Mapping[int, str]) -> dict[str, list[psutil.Process]]:
    """Processes below one, as far as they are no `parts` and below none, by what they run."""
    found: dict[str, list[psutil.Process]] = defaultdict(list)
    for child in process.children():
        if child.pid not in parts:
            with contextlib.suppress(psutil.NoSuchProcess):  # ended, or a zombie
                for helper in (child, *child.children(recursive=True)):
                    found[_task(helper.cmdline())].append(helper)
    return dict(found)


def _task(command: Sequence[str]) -> str:
    """A sandbox's command ends with its task, as JSON; others are a module."""
    found = _ENTRY.search(" ".join(command))
    if found is None and "-m" in command[:-1]:
        return command[command.index("-m") + 1]
    return found[1] if found else "helper"


def _row(name: str, members: Iterable[psutil.Process], own: Own | None) -> list[str]:
    infos = [member.memory_full_info() for member in members]
    rss, pss, uss = (sum(getattr(info, k) for info in infos) for k in ("rss", "pss", "uss"))
    held = ["", ""] if own is None else [_mib(own.weights), _mib(own.pools)]
    beyond = "" if own is None else _mib(rss - own.weights - own.pools)
    return [name, *held, _mib(rss), beyond, _mib(pss), _mib(uss)]


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MIB:.0f}"
