"""One child process of `epd serve`: start it, hear its READY line, keep its last words, end it.

Every child has its own process group (Ctrl-C in a terminal reaches the supervisor alone) and
asks Linux to kill it when the supervisor ends, however that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from epd.config import Config
from epd.forkserver import ForkFailed, ForkServer, Process
from epd.host import GATEWAY
from epd.ready import NOTIFY_SOCKET

READY_PREFIX = "READY "
"""A stage prints one line with this and a JSON object on stdout when it serves."""

_TAIL_LINES = 20
_LONGEST_LINE = 1 << 20


class StartFailure(Exception):
    """A child did not become ready; the message is the reason, for a person."""


@dataclass(slots=True, eq=False)
class Child:
    """One place in the service, over the restarts of its process."""

    role: str
    index: int
    settings: dict[str, str] = field(default_factory=dict)
    """Configuration of this child alone, on top of its environment."""
    process: Process | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    report: dict[str, Any] = field(default_factory=dict)
    """What the READY line said: pid and addresses."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))
    readers: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.role if self.role == GATEWAY else f"{self.role}-{self.index}"

    @property
    def addresses(self) -> str:
        keys = ("http", "grpc", "address", "metrics")
        return " ".join(f"{key}={self.report[key]}" for key in keys if self.report.get(key))

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def start(self, forks: ForkServer, environ: Mapping[str, str]) -> None:
        """Make the process; returns before it is ready.

        Raises:
            StartFailure: none can be made.
        """
        self.ready.clear()
        self.tail.clear()
        command = command_line(self.role, self.settings)
        readers, writers = zip(*(os.pipe() for _ in ("stdout", "stderr")), strict=True)
        try:
            self.process = await forks.spawn_soon(command, environ, *writers)
        except BaseException as error:
            for reader in readers:
                os.close(reader)
            if isinstance(error, ForkFailed):
                raise StartFailure(f"{self.name}: {error}") from error
            raise
        finally:
            for writer in writers:
                os.close(writer)
        self.ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self.process, _note_end, self.process, self.ended)
        self.readers = [asyncio.create_task(self._read(reader)) for reader in readers]

    async def until_ready(self, limit_s: float) -> None:
        """Wait for the READY line.

        Raises:
            StartFailure: the process ended, or `limit_s` seconds passed.
        """
        ready = asyncio.create_task(self.ready.wait())
        ended = asyncio.create_task(self.wait())
        try:
            await asyncio.wait({ready, ended}, timeout=limit_s, return_when="FIRST_COMPLETED")
            if ended.done():
                raise StartFailure(self.why())
            if not ready.done():
                raise StartFailure(f"{self.name}: not ready after {limit_s:g} s")
        finally:
            ready.cancel()
            ended.cancel()

    async def wait(self) -> None:
        """Until the process has ended and its last lines are read."""
        await self.ended.wait()
        await asyncio.wait(self.readers, timeout=1.0)

    def terminate(self) -> None:
        """Ask the process to drain and end."""
        assert self.process is not None
        self.process.terminate()

    def kill_group(self) -> None:
        """End at once whatever is left of the process and of those that it started."""
        if self.process is not None:
            self.process.kill_group()

    def collect(self) -> None:
        """Forget the dead among what an ended process had started."""
        if self.process is not None:
            self.process.collect()

    def why(self) -> str:
        """How it ended, and the last line that it printed, where that can be the reason."""
        code = self.process.returncode if self.process else None
        if code == -signal.SIGKILL:  # it could say nothing
            return f"{self.name} (SIGKILL): killed from outside, perhaps for want of memory"
        end = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        last = self.tail[-1] if self.tail else "it printed nothing"
        last = last.removeprefix(f"epd {self.role}: ")
        return f"{self.name} ({end}): {last}"

    async def _read(self, fd: int) -> None:
        """Pass lines on under the child's name, except the READY line, which is for us."""
        stream = asyncio.StreamReader(limit=_LONGEST_LINE)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(fd, "rb", buffering=0)
        )
        while not stream.at_eof():
            try:
                line = await stream.readline()
            except ValueError:  # longer than the limit; the reader has dropped it
                continue
            self._take(line.decode(errors="replace").rstrip())
        transport.close()

    def _take(self, text: str) -> None:
        if text.startswith(READY_PREFIX) and not self.ready.is_set():
            self.report = json.loads(text.removeprefix(READY_PREFIX))
            self.ready.set()
        elif text:
            self.tail.append(text)
            say(f"[{self.name}] {text}", sys.stderr)


def say(text: str, where: TextIO) -> None:
    """A line for people. Where it can't be written (a full disk, a terminal that is gone) it
    is lost, and nothing else: who waits for it here would stop a child that writes on."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: closed
        print(text, file=where, flush=True)


def _note_end(process: Process, ended: asyncio.Event) -> None:
    asyncio.get_running_loop().remove_reader(process)
    process.poll()
    ended.set()


def command_line(role: str, settings: Mapping[str, str]) -> list[str]:
    """How a process of one or more stages is started, here and in the tests."""
    options = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = ["worker", "--stages", role] if "+" in role else [role]
    return [sys.executable, "-m", "epd.cli", *command, *options]


def child_environment(config: Config, environ: Mapping[str, str]) -> dict[str, str]:
    """An environment that holds the whole configuration.

    Children must see what the supervisor saw, whichever of file, environment and flags it
    came from; ``--set`` then overrides single keys for single children.
    """
    kept = {key: value for key, value in environ.items() if not _is_setting(key)}
    kept.pop(NOTIFY_SOCKET, None)  # the service is ready when all of it is
    kept["PYTHONUNBUFFERED"] = "1"
    for section, values in config.model_dump(mode="json", exclude={"serve"}).items():
        for key, value in values.items():
            if (section, key) == ("gateway", "api_keys") and not value:
                continue  # none is no list of none: see `load_config`
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            kept[f"EPD_{section}__{key}".upper()] = text
    return kept


def _is_setting(name: str) -> bool:
    return name == "EPD_CONFIG" or (name.startswith("EPD_") and "__" in name)
