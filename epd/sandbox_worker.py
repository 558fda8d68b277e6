"""The other side of `epd.sandbox`: ``python -m epd.sandbox_worker FD TASK``, the zygote.

It loads the work, then forks a worker for each socket that it is sent, and answers with
the worker's pidfd. It has one thread, so that a fork has everything.
"""

from __future__ import annotations

import gc
import importlib
import json
import math
import os
import resource
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

PREFIX = struct.Struct("<IQ")
"""Bytes of the JSON head, bytes of the body (request) or of the memory sent along (reply)."""

Buffer = bytes | memoryview
Work = Callable[[dict[str, Any], bytes], tuple[dict[str, Any], Sequence[Buffer]]]


def send_request(channel: socket.socket, head: bytes, body: Sequence[Buffer]) -> None:
    channel.sendall(PREFIX.pack(len(head), sum(map(len, body))) + head)
    for piece in body:
        channel.sendall(piece)


def receive_exactly(channel: socket.socket, count: int) -> bytes:
    """Raises EOFError when the other side ends before that."""
    data = bytearray(count)
    view, got = memoryview(data), 0
    while got < count:
        size = channel.recv_into(view[got:])
        if not size:
            raise EOFError("the other side is gone")
        got += size
    return bytes(data)


def main(fd: int, task: Mapping[str, Any]) -> None:
    from epd.lifetime import die_with_expected_parent

    die_with_expected_parent()
    # A signal to the whole group means the server, which ends its workers when it is done.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    control = socket.socket(fileno=fd)
    work = _load(control, task)
    gc.collect()
    gc.freeze()  # shared pages stay shared in the workers
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads can't be forked"
    _reply(control, {"loaded": True}, ())
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            _be_a_worker(socket.socket(fileno=fds[0]), work, task)
        os.close(fds[0])
        pidfd = os.pidfd_open(pid)
        socket.send_fds(control, [b"p"], [pidfd])
        os.close(pidfd)


def _load(control: socket.socket, task: Mapping[str, Any]) -> Work:
    from epd.errors import EpdError

    module, _, name = task["entry"].partition(":")
    try:
        work: Work = getattr(importlib.import_module(module), name)(**task["arguments"])
    except EpdError as error:
        _reply(control, {"error": error.as_json()}, ())
        sys.exit(1)
    return work


def _be_a_worker(channel: socket.socket, work: Work, task: Mapping[str, Any]) -> NoReturn:
    from epd.lifetime import die_with_parent

    die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    allow_memory(int(task["memory_bytes"]))
    code = 0
    try:
        while True:
            head_bytes, body_bytes = PREFIX.unpack(receive_exactly(channel, PREFIX.size))
            head = json.loads(receive_exactly(channel, head_bytes))
            _serve(channel, work, head, receive_exactly(channel, body_bytes), task["cpu_s"])
    except (EOFError, OSError):
        pass  # the server is gone, or wants nothing more
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)


def _serve(
    channel: socket.socket, work: Work, head: dict[str, Any], body: bytes, cpu_s: float
) -> None:
    from epd.errors import EpdError

    allow_cpu(cpu_s)
    buffers: Sequence[Buffer] = ()
    try:
        answer, buffers = work(head, body)
    except EpdError as error:
        answer = {"error": error.as_json()}
    except Exception as error:
        traceback.print_exc()
        answer = {"fault": f"{type(error).__name__}: {error}"[:500]}
    _reply(channel, answer, buffers)


def _reply(channel: socket.socket, answer: Mapping[str, Any], buffers: Sequence[Buffer]) -> None:
    head = json.dumps(answer).encode()
    size = sum(len(buffer) for buffer in buffers)
    prefix = PREFIX.pack(len(head), size)
    if not size:
        channel.sendall(prefix + head)
        return
    fd = os.memfd_create("epd-reply")
    try:
        for buffer in buffers:
            left = memoryview(buffer)
            while left:
                left = left[os.write(fd, left) :]
        sent = socket.send_fds(channel, [prefix], [fd])
        channel.sendall(prefix[sent:] + head)
    finally:
        os.close(fd)


def allow_memory(more: int) -> None:
    """From now on this process may have so many bytes more of its own than it has."""
    memory = _own_memory() + more
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))


def allow_cpu(seconds: float) -> None:
    """The kernel kills this process after so much more CPU time, whatever code it is in."""
    used = math.ceil(time.process_time() + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (used, resource.RLIM_INFINITY))


def _own_memory() -> int:
    """Private writable memory of this process, as RLIMIT_DATA counts it."""
    with open("/proc/self/status") as status:
        found = [line.split()[1] for line in status if line.startswith("VmData:")]
    return int(found[0]) << 10 if found else 0


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
