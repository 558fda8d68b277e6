"""Python processes that begin with their imports done: forks of one that made them for all.

    owner ──starts──> fork server (imports; one thread, no state) ──forks──> process
      └────────────────── adopts it, as if it had started it itself ───────────┘

Why: torch and transformers take seconds of CPU time and hundreds of MB to import, and a
service is many processes that need both.

A process is forked twice, so that it is an orphan at once, and the owner has asked Linux
to be given its orphans. So to the owner it is a child like any other (exit code, signals,
death with its parent), and a fork server that dies takes nothing with it: the next `spawn`
starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from epd.lifetime import adopt_orphans, expect_parent
from epd.sandbox_worker import receive_exactly

REQUEST = struct.Struct("<I")
"""To the server: bytes of the JSON that follows; two descriptors, stdout and stderr."""
ANSWER = struct.Struct("<ii")
"""Of the server: process id and 0, or 0 and the errno."""
_CLOSE_S = 5.0
_ANSWER_S = 120.0
"""A server that takes longer, its imports included, hangs: another takes its place."""
_NO_SERVER = "the process that makes the others ended before it made one"
_ROOM = 1024
"""Bytes of the server's command line, in which its forks write theirs (for `ps`)."""


class ForkFailed(Exception):
    """No process could be made; the message says why."""


class Process:
    """A child that a fork server made; the part of `subprocess.Popen` that is needed."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        """As `subprocess` has it: minus the number of the signal that ended it."""
        self._pidfd = os.pidfd_open(pid)
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """Readable when the process has ended."""
        return self._pidfd

    def __del__(self) -> None:
        os.close(self._pidfd)

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        with self._lock:
            if self.returncode is None:
                found, status = os.waitpid(self.pid, os.WNOHANG)
                if found:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if (code := self.poll()) is not None:
            return code
        ready = select.poll()
        ready.register(self._pidfd, select.POLLIN)
        ready.poll(None if timeout is None else max(0.0, timeout) * 1e3)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Does nothing to one that has ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def kill_group(self) -> None:
        """End at once whatever is left of it and of what it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def collect(self) -> None:
        """Once it has ended: wait for its orphans, which are ours by now, as far as they
        have ended, too."""
        if self.poll() is not None:
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-self.pid, os.WNOHANG)[0]:
                    pass


class ForkServer:
    """Makes children of this process; `spawn` for threads, `spawn_soon` for tasks.

    Args:
        environ: of the server: what libraries read when they are loaded (OMP_*, MALLOC_*).
        model: checkpoint whose classes are imported too; "": what all models need; None:
            nothing at all (forks are then as good as new: for devices that don't survive
            a fork).
        folder: where it runs, and its forks.
    """

    def __init__(
        self, environ: Mapping[str, str], model: str | None, folder: str | None = None
    ) -> None:
        self._environ = dict(environ)
        self._model = model
        self._folder = folder
        self._server: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._turn = asyncio.Lock()
        self._thread_turn = threading.Lock()

    @property
    def pid(self) -> int | None:
        """Of the server, if one was started."""
        return self._server[0].pid if self._server else None

    def start(self) -> None:
        """Begin to import, if no server runs; `spawn` would do it, too."""
        if self._server is not None and self._server[0].poll() is not None:
            self._drop()
        if self._server is not None:
            return
        adopt_orphans()
        ours, theirs = socket.socketpair()
        model = "-" if self._model is None else f"={self._model}"
        with theirs:
            fd = theirs.fileno()
            command = [sys.executable, "-m", "epd.forkserver_process", str(fd), model, " " * _ROOM]
            process = subprocess.Popen(
                command,
                cwd=self._folder,
                pass_fds=[fd],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=expect_parent(self._environ | {"PYTHONUNBUFFERED": "1"}),
                process_group=0,
            )
        self._server = process, ours

    def spawn(
        self, command: Sequence[str], environ: Mapping[str, str], stdout: int, stderr: int
    ) -> Process:
        """Run ``[python, "-m", module, *arguments]`` in a process group of its own, with
        that environment and nothing else of this process but the two descriptors.

        Raises:
            ForkFailed: twice, the second time by a new server.
        """
        with self._thread_turn:
            for _ in range(2):
                try:
                    return self._answer(self._ask(command, environ, stdout, stderr))
                except (OSError, EOFError):
                    self._drop()
        raise ForkFailed(_NO_SERVER)

    async def spawn_soon(
        self, command: Sequence[str], environ: Mapping[str, str], stdout: int, stderr: int
    ) -> Process:
        """`spawn`, without holding up the event loop while the server still imports. One
        that was cancelled must be followed by `close`."""
        async with self._turn:
            for _ in range(2):
                try:
                    channel = self._ask(command, environ, stdout, stderr)
                    async with asyncio.timeout(_ANSWER_S):
                        await _readable(channel)
                    return self._answer(channel)
                except (OSError, EOFError):  # TimeoutError is an OSError
                    self.close()
        raise ForkFailed(_NO_SERVER)

    def close(self) -> None:
        """End the server; what it made lives on, but for one that nobody was told of."""
        if self._server is None:
            return
        process, channel = self._server
        process.kill()
        channel.settimeout(_CLOSE_S)
        with contextlib.suppress(OSError, EOFError, ForkFailed):
            while True:
                lost = self._answer(channel)
                lost.kill()
                lost.wait(_CLOSE_S)
        self._drop()

    def _ask(
        self, command: Sequence[str], environ: Mapping[str, str], stdout: int, stderr: int
    ) -> socket.socket:
        self.start()
        assert self._server is not None
        channel = self._server[1]
        body = json.dumps({"command": list(command), "environ": expect_parent(dict(environ))})
        data = body.encode()
        socket.send_fds(channel, [REQUEST.pack(len(data))], [stdout, stderr])
        channel.sendall(data)
        return channel

    def _answer(self, channel: socket.socket) -> Process:
        pid, reason = ANSWER.unpack(receive_exactly(channel, ANSWER.size))
        if reason:
            raise ForkFailed(f"no more processes: {os.strerror(reason)}")
        return Process(pid)

    def _drop(self) -> None:
        if self._server is not None:
            process, channel = self._server
            self._server = None
            channel.close()
            process.kill()
            process.wait()


async def _readable(channel: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(channel, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(channel)
