"""What a fork of the fork server (`epd.forkserver`) can do: fork helpers of its own, and
tell `ps` what it is."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from epd.forkserver import Process
from epd.lifetime import alone

_PR_SET_MM, _PR_SET_MM_ARG_END = 35, 9
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_command_line: tuple[int, int] | None = None
"""Where that of this process is in its memory: from, to. None: not a fork of the server."""


def become_server() -> None:
    """Forks of this process are those of a fork server."""
    global _command_line
    with open("/proc/self/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    _command_line = int(fields[45]), int(fields[46])


def may_fork() -> bool:
    """Whether this process is a fork of the server that is still as alone as it was.

    It may then fork helpers that need its imports, instead of starting them anew. A
    process with threads can't: what they hold would be held for ever.
    """
    return _command_line is not None and alone()


def fork_helper(run: Callable[[], object], command: Sequence[str], keep: int) -> Process:
    """Run a function in a child that has nothing of this process but its imports, standard
    streams (with nothing on stdout) and one descriptor, `keep`.

    `command` is what `ps` shows. Call it only where `may_fork`.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _be_a_helper(run, command, keep)
    return Process(pid)


def _be_a_helper(run: Callable[[], object], command: Sequence[str], keep: int) -> NoReturn:
    code = 1
    try:
        gc.freeze()  # nothing of the parent's may be closed here by a collection
        signal.set_wakeup_fd(-1)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.closerange(3, keep)
        os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))
        show_as(command)
        run()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def show_as(command: Sequence[str]) -> None:
    """Let `ps` show `command` for this fork, as far as there is room."""
    if _command_line is None:
        return
    start, end = _command_line
    text = b"\0".join(os.fsencode(part) for part in command)[: end - start - 1] + b"\0"
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))
    # Where the end may not be moved, the rest shows as empty arguments.
    libc: Any = ctypes.CDLL(None)
    last = ctypes.c_ulong(start + len(text))
    libc.prctl(_PR_SET_MM, _PR_SET_MM_ARG_END, last, ctypes.c_ulong(0), ctypes.c_ulong(0))
