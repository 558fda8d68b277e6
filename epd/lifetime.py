"""Processes that never outlive the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_EXPECTED_PARENT = "EPD_PARENT_PID"


def expect_parent(environ: dict[str, str]) -> dict[str, str]:
    """Environment for a child that is to die with this process (see `die_with_parent`)."""
    return environ | {_EXPECTED_PARENT: str(os.getpid())}


def die_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Ask Linux to send this process a signal when its parent ends, however it ends.

    Called in the child, e.g. as the initializer of a process pool, whose workers would
    otherwise outlive a killed parent. Elsewhere than on Linux it does nothing.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0)


def die_with_expected_parent() -> None:
    """`die_with_parent`, if whoever started this process asked for it with `expect_parent`.

    A parent that was gone before the request to Linux is noticed by its pid.
    """
    expected = os.environ.pop(_EXPECTED_PARENT, None)
    if expected is None:
        return
    die_with_parent()
    if os.getppid() != int(expected):
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Ask Linux to make this process the parent of its descendants whose own parent ends.

    They are then to be waited for like children.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "this system gives no orphans")


def alone() -> bool:
    """Whether this process has one thread, so that a fork of it has everything."""
    return len(os.listdir("/proc/self/task")) == 1
