"""``python -m tests.in_pod NAMESPACE FOLDER MODULE ARGUMENTS``: runs a module as in a pod.

The network of that file's namespace, /etc/hosts of the folder (a cluster's DNS), a read-only
root, in which only TMPDIR and XDG_CACHE_HOME can be written to, no /dev/shm, no capabilities.
The user is still root, and what he may read.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from tests.in_node import enter

_NEW_MOUNTS = 0x00020000
_READ_ONLY, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 1, 32, 4096, 1 << 14, 1 << 18
_DROP, _NO_NEW_PRIVILEGES = 24, 38
_CAPABILITIES_V3 = 0x20080522


def _checked(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def lock_up(folder: Path) -> None:
    """A file system of its own for this process, which has one thread."""
    libc: Any = ctypes.CDLL(None, use_errno=True)

    def mount(source: str, target: str, kind: str, flags: int) -> None:
        line = (text.encode() for text in (source, target, kind))
        _checked(libc.mount(*line, flags, None), f"mount {target}")

    _checked(libc.unshare(_NEW_MOUNTS), "unshare")
    mount("none", "/", "", _RECURSIVE | _PRIVATE)
    mount(str(folder / "hosts"), "/etc/hosts", "", _BIND)
    for writable in (os.environ["TMPDIR"], os.environ["XDG_CACHE_HOME"]):
        mount(writable, writable, "", _BIND)
    mount("none", "/", "", _REMOUNT | _BIND | _READ_ONLY)
    mount("none", "/dev/shm", "tmpfs", _READ_ONLY)


def drop_capabilities() -> None:
    libc: Any = ctypes.CDLL(None, use_errno=True)
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    for capability in range(last + 1):
        _checked(libc.prctl(_DROP, capability, 0, 0, 0), "prctl")
    _checked(libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0), (ctypes.c_uint32 * 6)()
    _checked(libc.capset(header, none), "capset")


if __name__ == "__main__":
    enter(sys.argv[1])
    lock_up(Path(sys.argv[2]))
    drop_capabilities()
    del sys.argv[:3]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
