"""`epd serve` as a process of a script: started on free ports, stopped, nothing left over."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
START_LIMIT_S = 600.0
STOP_LIMIT_S = 30.0
_ANY_PORTS = ("gateway.http_port", "gateway.grpc_port", "gateway.membership_port")


class ServiceFailure(Exception):
    """The service did not start, or did not end as it should; the message says why."""


@dataclass(slots=True)
class Service:
    """A running `epd serve`."""

    url: str
    """Base URL of the API, with /v1."""
    model: str
    pid: int
    """Of the supervisor: all processes of the service descend from it."""
    pids: dict[str, int] = field(default_factory=dict)
    """Of each process, by its name ("gateway", "decode-0")."""
    metrics: dict[str, str] = field(default_factory=dict)
    """host:port of each worker's metrics, by its name."""


def end_on_sigterm() -> None:
    """SIGTERM ends this script as Ctrl-C does: with what it started, whose processes would
    otherwise go on. Called from the main thread, before anything is started."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@contextmanager
def epd_service(
    checkpoint: str | Path,
    settings: Sequence[str] = (),
    flags: Sequence[str] = (),
    say: Callable[[str], None] = lambda line: None,
    log: Path | None = None,
) -> Iterator[Service]:
    """A service that lives for the block; `say` gets the lines it prints, `log` what
    its processes say on stderr.

    Raises:
        ServiceFailure: it did not start, did not stop in time, ended with another exit code
            than 0, or left processes behind.
    """
    with starting(checkpoint, settings, flags, say, log) as until_serving:
        yield until_serving()


@contextmanager
def starting(
    checkpoint: str | Path,
    settings: Sequence[str] = (),
    flags: Sequence[str] = (),
    say: Callable[[str], None] = lambda line: None,
    log: Path | None = None,
) -> Iterator[Callable[[], Service]]:
    """`epd_service` that is not waited for: what the block gets, it calls for that. A block
    that ends by an exception ends the service, however far it is.

    Raises:
        ServiceFailure: as `epd_service`.
    """
    command = [sys.executable, "-m", "epd.cli", "serve", str(checkpoint), *flags]
    limit = f"serve.start_timeout_s={START_LIMIT_S}"
    for setting in (*(f"{key}=0" for key in _ANY_PORTS), limit, *settings):
        command += ["--set", setting]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    errors: deque[str] = deque(maxlen=30)

    def until_serving() -> Service:
        watchdog = threading.Timer(START_LIMIT_S, process.kill)
        watchdog.start()
        try:
            return _until_serving(process, errors, say)
        finally:
            watchdog.cancel()

    try:
        assert process.stderr is not None
        threading.Thread(target=_follow, args=(process.stderr, errors, log), daemon=True).start()
        yield until_serving
    except BaseException:
        process.terminate()
        process.communicate()
        raise
    _stop(process, say)


def _follow(lines: Iterable[str], last: deque[str], log: Path | None) -> None:
    """Keep the last lines for an error, all of them in the log."""
    with open(log or os.devnull, "w", buffering=1) as out, contextlib.suppress(ValueError):
        for line in lines:  # ValueError: `communicate` closed it, the process has ended
            last.append(line)
            out.write(line)


def _until_serving(
    process: subprocess.Popen[str], errors: deque[str], say: Callable[[str], None]
) -> Service:
    assert process.stdout is not None
    pids: dict[str, int] = {}
    metrics: dict[str, str] = {}
    for line in process.stdout:
        say(line.rstrip())
        if found := re.match(r"epd serve: \S+ (\S+) ready .*\bpid (\d+)", line):
            pids[found[1]] = int(found[2])
            if at := re.search(r"\bmetrics=(\S+)", line):
                metrics[found[1]] = at[1]
        if found := re.match(r"epd serve: \S+ serving (\S+) at (\S+) ", line):
            return Service(found[2], found[1], process.pid, pids, metrics)
    process.wait()
    time.sleep(0.2)  # the thread that reads stderr may be a moment behind
    raise ServiceFailure("epd serve did not start:\n" + "".join(errors))


def _stop(process: subprocess.Popen[str], say: Callable[[str], None]) -> None:
    """Ctrl-C, as a person would; then nothing may be left."""
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    try:
        rest, _ = process.communicate(timeout=STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise ServiceFailure(f"epd serve did not stop within {STOP_LIMIT_S:g} s") from None
    for line in rest.splitlines():
        say(line)
    if process.returncode != 0:
        raise ServiceFailure(f"epd serve ended with exit code {process.returncode}")
    time.sleep(0.5)  # helpers of the stages see their parent's end a moment later
    if left := [member for member in family if still_runs(member)]:
        raise ServiceFailure(f"processes left over: {left}")


def still_runs(process: psutil.Process) -> bool:
    """False for one that is dead and only waits to be collected by init."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
