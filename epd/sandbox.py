"""Work on hostile bytes in processes that can be killed, each request at its own risk.

    Sandbox ──starts──> zygote (loads what the work needs, once) ──forks──> workers
       │ one thread a worker: request ──> worker, reply <── worker, or kill it

Why not a process pool of the standard library: those can't kill one worker, and a worker
that takes seconds to load can't be replaced in milliseconds. A killed worker's place is
taken by a fork of the zygote. This bounds time and memory; it is no defence against code
that has taken a worker over.

Replies come in memory of their own (a memfd that the worker filled, mapped here): no copy,
and no name that could be left over.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import mmap
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from epd import sandbox_worker
from epd.errors import EpdError, ErrorKind
from epd.forked import fork_helper, may_fork
from epd.forkserver import Process
from epd.lifetime import expect_parent
from epd.sandbox_worker import PREFIX, Buffer, receive_exactly, send_request
from epd.turns import Turns

_log = logging.getLogger(__name__)
_START_S = 120.0
AT_ONCE = True
"""Whether a zygote is started with its sandbox, so that the first request finds it there, or
by the first request. (For tests that open gateways by the hundred.)"""
_ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1"
)
"""A zygote with threads could not be forked: they and what they hold would be lost."""
_PATIENCE = 4
"""Wall time allowed, in CPU limits: the machine may be busy, but a worker that waits for
something for ever must end as well."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What one request may take."""

    cpu_s: float
    """CPU time, in whole seconds for the kernel: rounded up."""
    memory_bytes: int
    """Memory of its own beyond what the worker holds when idle."""


@dataclass(frozen=True, slots=True)
class Reply:
    """`data` is shared memory that lives as long as something refers to it."""

    head: dict[str, Any]
    data: memoryview


class WorkerDied(Exception):
    """The request killed its worker: it took too long, or broke it."""

    def __init__(self, timed_out: bool) -> None:
        super().__init__("took too long" if timed_out else "crashed or ran out of memory")
        self.timed_out = timed_out


class Sandbox:
    """`workers` processes that run one function.

    Args:
        entry: ``module:function``; called once as ``function(**arguments)`` in the zygote,
            it returns ``work(head, body) -> (head, buffers)``. EpdErrors that the work
            raises are raised by `run`.
        arguments: JSON.
    """

    def __init__(
        self, entry: str, arguments: Mapping[str, Any], workers: int, limits: SandboxLimits
    ) -> None:
        self._limits = limits
        self._zygote = _Zygote(entry, arguments, limits)
        self._threads = ThreadPoolExecutor(workers, f"sandbox-{entry}")
        self._turns = Turns(workers)
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._workers = [_Worker(self._zygote) for _ in range(workers)]
        for worker in self._workers:
            self._idle.put(worker)
        self.killed = 0

    async def start(self) -> None:
        """Return when all workers are ready.

        Raises:
            EpdError: the work could not be loaded.
        """
        loop = asyncio.get_running_loop()
        warm = [loop.run_in_executor(self._threads, self._warm) for _ in self._workers]
        await asyncio.gather(*warm)

    async def run(
        self, head: Mapping[str, Any], body: bytes | Sequence[Buffer], client: Hashable = b""
    ) -> Reply:
        """One request, in its turn and its client's; `body` may be in pieces.

        Raises:
            EpdError: from the work; STAGE_UNAVAILABLE, no worker can be started.
            WorkerDied: time or memory ran out, or two workers crashed of it.
            RuntimeError: the work raised something else.
        """
        loop = asyncio.get_running_loop()
        pieces = (body,) if isinstance(body, bytes) else body
        # Who waits waits here: given up, it is forgotten, and so are its bytes. What a worker
        # has it goes on with, and until then it is not free.
        await self._turns.acquire(client)
        work = loop.run_in_executor(self._threads, self._run, head, pieces)
        work.add_done_callback(self._done)
        return await asyncio.shield(work)

    def _done(self, work: asyncio.Future[Reply]) -> None:
        self._turns.release()
        if not work.cancelled() and isinstance(work.exception(), WorkerDied):
            self.killed += 1
            with contextlib.suppress(RuntimeError):  # closed
                self._threads.submit(self._warm)

    def close(self) -> None:
        """Kill everything; requests that are under way fail."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()
        self._zygote.close()

    def _warm(self) -> None:
        worker = self._idle.get()
        try:
            worker.ensure()
        finally:
            self._idle.put(worker)

    def _run(self, head: Mapping[str, Any], body: Sequence[Buffer]) -> Reply:
        try:
            reply = self._exchange(head, body)
        except WorkerDied as died:
            if died.timed_out:
                raise
            # Killed from outside, perhaps: by the kernel for memory, or with its zygote.
            # What kills a second worker did it itself.
            reply = self._exchange(head, body)
        _raise_error(reply.head)
        if "fault" in reply.head:
            raise RuntimeError(reply.head["fault"])
        return reply

    def _exchange(self, head: Mapping[str, Any], body: Sequence[Buffer]) -> Reply:
        worker = self._idle.get()
        try:
            return worker.exchange(head, body, self._limits.cpu_s)
        finally:
            self._idle.put(worker)


def _unavailable() -> EpdError:
    reason = "a sandbox process could not be started; try again"
    return EpdError(ErrorKind.STAGE_UNAVAILABLE, reason, retry_after_s=1.0)


def _raise_error(head: Mapping[str, Any]) -> None:
    if (error := head.get("error")) is not None:
        raise EpdError.from_json(error)


class _Worker:
    """This process's end of one worker; used by one thread at a time."""

    def __init__(self, zygote: _Zygote) -> None:
        self._zygote = zygote
        self._socket: socket.socket | None = None
        self._pidfd = -1

    def ensure(self) -> socket.socket:
        if self._socket is None:
            self._socket, self._pidfd = self._zygote.fork()
        return self._socket

    def exchange(self, head: Mapping[str, Any], body: Sequence[Buffer], cpu_s: float) -> Reply:
        channel = self.ensure()
        started = time.monotonic()
        channel.settimeout(_PATIENCE * cpu_s)
        try:
            send_request(channel, json.dumps(head).encode(), body)
            return _receive_reply(channel)
        except (OSError, EOFError) as error:
            self.kill()
            # A worker that the kernel stopped for its CPU time looks like one that crashed.
            waited = isinstance(error, TimeoutError)
            timed_out = waited or time.monotonic() - started >= cpu_s
            # What computes too long is what a client sent; what waits too long, a full machine's
            # doing.
            level = logging.INFO if timed_out and not waited else logging.WARNING
            _log.log(level, "a sandbox worker died", extra={"timed_out": timed_out})
            raise WorkerDied(timed_out) from error

    def kill(self) -> None:
        pidfd, self._pidfd = self._pidfd, -1
        channel, self._socket = self._socket, None
        if pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):  # it was quicker
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        if channel is not None:
            channel.close()


def _receive_reply(channel: socket.socket) -> Reply:
    prefix, fds, _, _ = socket.recv_fds(channel, PREFIX.size, 1)
    try:
        if not prefix:
            raise EOFError("the worker is gone")
        prefix += receive_exactly(channel, PREFIX.size - len(prefix))
        head_bytes, data_bytes = PREFIX.unpack(prefix)
        head = json.loads(receive_exactly(channel, head_bytes))
        if not data_bytes:
            return Reply(head, memoryview(b""))
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        return Reply(head, memoryview(mmap.mmap(fds[0], data_bytes, flags=flags)))
    finally:
        for fd in fds:
            os.close(fd)


class _Zygote:
    """The process that workers are forked from. Started at once (`AT_ONCE`), and again if it
    dies."""

    def __init__(self, entry: str, arguments: Mapping[str, Any], limits: SandboxLimits) -> None:
        self._task = json.dumps(
            {
                "entry": entry,
                "arguments": dict(arguments),
                "cpu_s": limits.cpu_s,
                "memory_bytes": limits.memory_bytes,
            }
        )
        self._lock = threading.Lock()
        self._closed = False
        self._loaded = False
        self._life = self._launch() if AT_ONCE else None

    def fork(self) -> tuple[socket.socket, int]:
        """(channel to a new worker, pidfd of it).

        Raises:
            EpdError: the work can't be loaded; STAGE_UNAVAILABLE for other reasons.
        """
        with self._lock:
            if self._closed:
                raise _unavailable()
            try:
                control = self._living()
                self._until_loaded(control)
                return self._fork(control)
            except (OSError, EOFError) as error:
                raise _unavailable() from error

    def _living(self) -> socket.socket:
        """The way to the process, which is started if there is none."""
        if self._life is not None and self._life[0].poll() is not None:
            self._life[1].close()
            self._life = None
        if self._life is None:
            self._life = self._launch()
            if self._closed:  # meanwhile
                self.close()
                raise _unavailable()
        return self._life[1]

    def _until_loaded(self, control: socket.socket) -> None:
        if not self._loaded:
            _raise_error(_receive_reply(control).head)
            self._loaded = True

    def _fork(self, control: socket.socket) -> tuple[socket.socket, int]:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(control, [b"f"], [theirs.fileno()])
                answer, fds, _, _ = socket.recv_fds(control, 1, 1)
                if not answer:
                    raise EOFError("the zygote is gone")
            except BaseException:
                ours.close()
                raise
        return ours, fds[0]

    def close(self) -> None:
        """Its workers die with it."""
        self._closed = True
        if self._life is not None:
            process, control = self._life
            process.kill()
            process.wait()
            control.close()

    def _be_zygote(self, fd: int, environ: Mapping[str, str]) -> None:
        os.environ.update(environ)
        sandbox_worker.main(fd, json.loads(self._task))

    def _launch(self) -> tuple[subprocess.Popen[bytes] | Process, socket.socket]:
        self._loaded = False
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            command = [sys.executable, "-m", "epd.sandbox_worker", str(fd), self._task]
            environ = expect_parent(os.environ | _ONE_THREAD)
            process: subprocess.Popen[bytes] | Process
            if may_fork():
                process = fork_helper(lambda: self._be_zygote(fd, environ), command, keep=fd)
            else:
                process = subprocess.Popen(
                    command,
                    pass_fds=[fd],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env=environ,
                )
        ours.settimeout(_START_S)
        return process, ours
