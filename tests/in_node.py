"""``python -m tests.in_node NAMESPACE MODULE ARGUMENTS``: runs a module in a network namespace.

For forks of `epd.forkserver`: `nsenter` would start a program, and its imports, anew.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import sys

_CLONE_NEWNET = 0x40000000


def enter(namespace: str) -> None:
    """Move this process, which has one thread, into the network of that file's namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(namespace) as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), namespace)


if __name__ == "__main__":
    enter(sys.argv[1])
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
