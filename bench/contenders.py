"""The servers of `bench.compare` and `bench.interference`: started, asked and stopped together."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.peers import servers
from bench.peers.servers import Rival
from bench.service import ServiceFailure, starting
from epd.bench.campaign import connect
from epd.bench.client import open_session
from epd.bench.load import Target


@dataclass(frozen=True, slots=True)
class Contender:
    """A server that is up."""

    name: str
    url: str
    model: str
    pid: int
    extra: dict[str, Any] = field(default_factory=dict)
    pids: dict[str, int] = field(default_factory=dict)
    """Of epd's processes, by name."""
    how: str = ""
    """Threads and cores, for the table."""

    @property
    def ours(self) -> bool:
        return self.name.startswith("epd")


Up = Callable[[], Contender]
"""Waits until a server that was begun is up."""
Start = Callable[[], AbstractContextManager[Up]]
_FAILURES = (ServiceFailure, RuntimeError, OSError)
"""Of a server that doesn't start."""


def epd_split(checkpoint: Path, out: Path) -> Start:
    """Decode and gateway on one half of the cores, encode and prefill on the other."""
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    first, second = (",".join(map(str, part)) for part in (cores[:half], cores[half:] or cores))
    # Long prefill steps hold nobody up here, and large chunks are cheaper.
    settings = [f"model.threads={half}", "prefill.step_ms=1000"]
    settings += [f"{stage}.cpus={first}" for stage in ("gateway", "decode")]
    settings += [f"{stage}.cpus={second}" for stage in ("encode", "prefill")]
    how = f"decode and gateway on {first}, encode and prefill on {second}, {half} thread(s) each,"
    how += " prefill.step_ms=1000"
    return lambda: _epd("epd split", checkpoint, settings, (), how, out)


def epd_unpinned(checkpoint: Path, out: Path, settings: Sequence[str]) -> Start:
    """Each stage a process with one thread, on whatever core is free: a core that one stage
    doesn't need is another's."""
    cores = os.cpu_count()
    how = ", ".join([f"three processes on all {cores} cores, one thread each", *settings])
    name = ", ".join(["epd split unpinned", *settings])
    return lambda: _epd(name, checkpoint, ("model.threads=1", *settings), (), how, out)


def epd_in_turns(checkpoint: Path, threads: int, out: Path, settings: Sequence[str]) -> Start:
    """Each stage a process with a thread for every core; their forwards take turns."""
    how = f"three processes that take turns, {threads} threads each"
    name = ", ".join(["epd split, turns", *(s.rpartition(".")[2] for s in settings)])
    settings = ("serve.turns=true", f"model.threads={threads}", *settings)
    return lambda: _epd(name, checkpoint, settings, (), ", ".join([how, *settings[2:]]), out)


def epd_monolithic(checkpoint: Path, threads: int, out: Path, step_ms: float) -> Start:
    """All stages in one process, with this chunk budget."""
    name = f"epd monolithic, {step_ms:g} ms"
    return epd_with(checkpoint, threads, out, (f"prefill.step_ms={step_ms:g}",), name)


def epd_with(
    checkpoint: Path, threads: int, out: Path, settings: Sequence[str], name: str = ""
) -> Start:
    """All stages in one process, with these settings, which are its name, too."""
    how = ", ".join(["all stages in one process", f"{threads} threads", *settings])
    name = name or ", ".join(["epd colocated", *(s.rpartition(".")[2] for s in settings)])
    flags = ("--stages", "encode+prefill+decode")
    settings = (f"model.threads={threads}", *settings)
    return lambda: _epd(name, checkpoint, settings, flags, how, out)


@contextmanager
def _epd(
    name: str, checkpoint: Path, settings: Sequence[str], flags: Sequence[str], how: str, out: Path
) -> Iterator[Up]:
    log = out / f"{name}.log"
    with starting(checkpoint, settings, flags, log=log) as until_serving:

        def up() -> Contender:
            one = until_serving()
            return Contender(name, one.url, one.model, one.pid, {}, dict(one.pids), how)

        yield up


def rival(server: Rival, log: Path, threads: int) -> Start:
    return lambda: _rival(server, log, threads)


@contextmanager
def _rival(server: Rival, log: Path, threads: int) -> Iterator[Up]:
    with servers.starting(server, log) as until_healthy:
        extra, how = dict(server.extra), f"{threads} threads"
        yield lambda: Contender(
            server.name, server.url, server.model, until_healthy(), extra, {}, how
        )


@contextmanager
def all_running(starts: Sequence[Start]) -> Iterator[list[Contender]]:
    """All of them begin at once: each waits most of its start for something else. One that
    does not start is said, and the others go on. They are waited for in this thread: what
    ends it (Ctrl-C) ends them, however far they are.

    Raises:
        RuntimeError: none of them started.
    """
    with ExitStack() as stack:
        begun: list[tuple[ExitStack, Up]] = []
        for start in starts:
            own = stack.enter_context(ExitStack())
            with _left_out(own):
                begun.append((own, own.enter_context(start())))
        contenders = []
        for own, up in begun:
            with _left_out(own):
                contenders.append(up())
        if not contenders:
            raise RuntimeError("no server started")
        yield contenders


@contextmanager
def _left_out(own: ExitStack) -> Iterator[None]:
    """What fails in the block is said, and what it had of its own is ended."""
    try:
        yield
    except _FAILURES as failure:
        print(f"left out: {failure}", file=sys.stderr, flush=True)
        own.__exit__(type(failure), failure, failure.__traceback__)


@asynccontextmanager
async def connected(contenders: Sequence[Contender]) -> AsyncIterator[list[Target]]:
    """All of them as targets. A connection for each request: llama.cpp drops them after a
    stream."""
    async with open_session(300.0, keep=False) as http:
        yield [
            await connect(c.name, c.url, http, c.model, "none", (c.pid,), c.extra)
            for c in contenders
        ]
