"""The other side of `epd.forkserver`: ``python -m epd.forkserver_process FD MODEL ROOM``.

It imports, then forks whenever it is asked. It has one thread and has used nothing of
gRPC, Mooncake or a device, so that a fork has all that it needs and nothing half done.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import runpy
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from epd.forked import become_server, show_as
from epd.forkserver import ANSWER, REQUEST
from epd.lifetime import alone, die_with_expected_parent
from epd.sandbox_worker import receive_exactly

_ADOPTION_S = 10.0


@dataclass(frozen=True, slots=True)
class _Job:
    command: list[str]
    environ: dict[str, str]
    fds: list[int]


def main(fd: int, model: str) -> None:
    """Serve until the owner ends; in each forked process: run its command.

    `model` is "=" and a checkpoint, "=" alone, or "-": import nothing.
    """
    die_with_expected_parent()
    become_server()
    control = socket.socket(fileno=fd)
    if model != "-" and not (_preloaded(model) and alone()):
        # Some library can't be imported, or started threads at that: then without imports.
        os.set_inheritable(fd, True)
        os.execv(
            sys.executable,
            [sys.executable, "-m", "epd.forkserver_process", str(fd), "-", *sys.argv[3:]],
        )
    gc.collect()
    gc.freeze()  # a collection in a fork would copy all pages that it looks at
    job = _serve(control)
    if job is not None:
        _run(job.command)


def _preloaded(model: str) -> bool:
    """ "=path" or "=" is imported; of "-" nothing is."""
    if not model.startswith("="):
        return True
    from epd.host import preload

    try:
        preload(model[1:])
    except Exception:
        traceback.print_exc()
        return False
    return True


def _serve(control: socket.socket) -> _Job | None:
    """Fork for each request. Returns in the forked processes, and at the owner's end."""
    while True:
        prefix, fds, _, _ = socket.recv_fds(control, REQUEST.size, 2)
        if len(prefix) < REQUEST.size:
            return None
        request = json.loads(receive_exactly(control, REQUEST.unpack(prefix)[0]))
        job = _Job(request["command"], request["environ"], fds)
        try:
            pid, reason = _fork_orphan(control, job), 0
        except OSError as error:
            pid, reason = 0, error.errno or errno.EAGAIN
        if pid < 0:
            return job
        for fd in fds:
            os.close(fd)
        control.sendall(ANSWER.pack(pid, reason))


def _fork_orphan(control: socket.socket, job: _Job) -> int:
    """Process id of a new orphan, which its subreaper has by now; in it: -1."""
    reader, writer = os.pipe()
    middle = os.fork()
    if middle:
        os.close(writer)
        with open(reader, "rb") as answer:
            pid, reason = ANSWER.unpack(answer.read() or ANSWER.pack(0, errno.EAGAIN))
        os.waitpid(middle, 0)
        if reason:
            raise OSError(reason, os.strerror(reason))
        return int(pid)
    os.close(reader)
    middle = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        os.write(writer, ANSWER.pack(0, error.errno or errno.EAGAIN))
        os._exit(1)
    if pid:
        os.setpgid(pid, pid)
        os.write(writer, ANSWER.pack(pid, 0))
        os._exit(0)
    os.close(writer)
    control.close()
    _become(job, middle)
    return -1


def _become(job: _Job, middle: int) -> None:
    """Leave nothing of the server in this process but its imports."""
    for fd, ours in zip(job.fds, (1, 2), strict=True):
        os.dup2(fd, ours)
        os.close(fd)
    os.environ.clear()
    os.environ.update(job.environ)
    tempfile.tempdir = None  # it may be another one now
    show_as(job.command)
    deadline = time.monotonic() + _ADOPTION_S
    while os.getppid() == middle and time.monotonic() < deadline:
        time.sleep(0.001)
    die_with_expected_parent()


def _run(command: Sequence[str]) -> None:
    """As the interpreter runs ``python -m module arguments``."""
    assert command[1] == "-m", command
    sys.argv = list(command[2:])
    runpy.run_module(command[2], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
