"""One prompt process as the pool sees it: its lives, and what it was asked in this one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import orjson

from epd.config import ModelConfig
from epd.errors import EpdError, ErrorKind
from epd.forked import fork_helper, may_fork
from epd.forkserver import Process
from epd.lifetime import expect_parent
from gateway import prompt_process as wire

_Child = subprocess.Popen[bytes] | Process
_log = logging.getLogger(__name__)
_CLOSE_S = 2.0
_PATIENCE = 4
"""Wall time allowed, in CPU limits: the machine may be busy, but a process that waits for
something for ever must end as well."""
LOAD_S = 600.0
"""For a process's first request, before which it loads the checkpoint: from a cold disk that
others read, too, that took more than two minutes. Who started the gateway has a limit of its
own (`serve.start_timeout_s`)."""


class NotBegun(Exception):
    """The process died of an earlier request; this one may be asked again."""


class TooLong(Exception):
    """The process was ended because this request took too long; not because loading did."""


@dataclass(frozen=True, slots=True)
class _Asked:
    reply: asyncio.Future[Mapping[str, Any]]
    over: Callable[[], None]


class PromptProcess:
    """One process and what it was asked, in order. Started when it is first needed, and
    again when it is needed after its death."""

    def __init__(self, model: ModelConfig, bounds: wire.Bounds) -> None:
        self._model = model
        self.bounds = bounds
        self._life: _Life | None = None
        self._starting: asyncio.Task[_Life] | None = None
        self._closed = False
        self.deaths = 0

    @property
    def at_hand(self) -> int:
        return 0 if self._life is None else len(self._life.asked)

    async def ask(self, request: Mapping[str, Any], over: Callable[[], None]) -> Mapping[str, Any]:
        """Its reply. `over` is called once, when the process has nothing more to do with it.

        Raises:
            EpdError: STAGE_UNAVAILABLE, it died of it, can't be started or doesn't get loaded.
            TooLong: it took more than its time.
            NotBegun: it died before it came to this.
        """
        life = self._life
        if life is None:
            try:
                life = await self._started()
            except BaseException:
                over()
                raise
        return await life.ask(request, over)

    async def _started(self) -> _Life:
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        try:
            return await asyncio.shield(self._starting)
        except OSError as error:
            _log.error("a prompt process can't be started: %s", error)
            raise _died() from error

    async def _start(self) -> _Life:
        try:
            if self._closed:
                raise _died()
            self._life = await _Life.start(self._model, self.bounds, self._on_death)
            return self._life
        finally:
            self._starting = None

    def _on_death(self) -> None:
        self._life = None
        if not self._closed:
            self.deaths += 1

    async def close(self) -> None:
        self._closed = True
        if self._life is not None:
            await self._life.end()


class _Life(asyncio.Protocol):
    """The connection to one life of a process; replies come in the order of requests."""

    def __init__(self, process: _Child, cpu_s: float, on_death: Callable[[], None]) -> None:
        self._process = process
        self._cpu_s = cpu_s
        self._on_death = on_death
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self.asked: deque[_Asked] = deque()
        self._loop = asyncio.get_running_loop()
        self._since = 0.0
        """When it began with the first of `asked`."""
        self._patience = LOAD_S
        """Wall time for the first of `asked`."""
        self._has_answered = False
        self._late = False
        self._unwanted = False
        """It is ended: no matter how."""
        self._alarm: asyncio.TimerHandle | None = None
        self._end: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, model: ModelConfig, bounds: wire.Bounds, on_death: Callable[[], None]
    ) -> _Life:
        """Raises OSError where no process can be started."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = _launch(model, bounds, theirs.fileno())
        life = cls(process, bounds.cpu_s, on_death)
        await life._loop.create_unix_connection(lambda: life, sock=ours)
        return life

    async def ask(self, request: Mapping[str, Any], over: Callable[[], None]) -> Mapping[str, Any]:
        """See `PromptProcess.ask`."""
        assert self._transport is not None
        if self._transport.is_closing():
            over()
            raise _died()
        asked = _Asked(self._loop.create_future(), over)
        self.asked.append(asked)
        if len(self.asked) == 1:
            self._begins()
        self._transport.write(wire.frame(request))
        return await asked.reply

    def _begins(self) -> None:
        """It works on the first of `asked` from now on."""
        self._since = self._loop.time()
        if self._alarm is None:
            self._alarm = self._loop.call_later(self._patience, self._look)

    def _loaded(self) -> None:
        """It has answered, so that from now on requests take what they take themselves."""
        if self._has_answered:
            return
        self._has_answered = True
        self._patience = _PATIENCE * self._cpu_s
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _look(self) -> None:
        """Once in a while, rather than with each request: is one late?"""
        self._alarm = None
        if not self.asked:
            return
        left = self._since + self._patience - self._loop.time()
        if left > 0:
            self._alarm = self._loop.call_later(left, self._look)
        else:
            self._late = True
            self._process.kill()

    async def end(self) -> None:
        """Kill it; what it was asked fails."""
        assert self._transport is not None
        self._unwanted = True
        self._process.kill()
        self._transport.abort()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(self._process.wait), _CLOSE_S)

    # --- asyncio.Protocol ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        self._received += data
        size = wire.LENGTH.size
        while len(self._received) >= size:
            (length,) = wire.LENGTH.unpack_from(self._received)
            if len(self._received) < size + length:
                return
            with memoryview(self._received) as view:
                reply = orjson.loads(view[size : size + length])
            del self._received[: size + length]
            self._loaded()
            asked = self.asked.popleft()
            asked.over()
            if not asked.reply.done():  # else given up
                asked.reply.set_result(reply)
            if self.asked:
                self._begins()

    def connection_lost(self, error: Exception | None) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._process.kill()  # it may have closed its end and live on
        self._on_death()
        left, self.asked = self.asked, deque()
        self._end = self._loop.create_task(self._bury(left))

    async def _bury(self, left: deque[_Asked]) -> None:
        """How it ended is known when it is reaped; the first of `left` was the cause."""
        code = await asyncio.to_thread(self._process.wait)
        computed = code == -signal.SIGXCPU
        late = self._late or computed
        # Loading has no bound of CPU time: what computes too long is a prompt, the first, too.
        hung = late and not computed and not self._has_answered
        if not self._unwanted:
            # What computes too long is what a client sent; what waits too long, a disk's or a
            # full machine's doing.
            level = logging.INFO if computed else logging.WARNING if late else logging.ERROR
            how = "took too long to load" if hung else "took too long" if late else "died"
            _log.log(level, "a prompt process %s: the next request starts another", how)
        for asked in left:
            asked.over()
            if not asked.reply.done():
                cause = _not_loaded() if hung else TooLong() if late else _died()
                asked.reply.set_exception(cause if asked is left[0] else NotBegun())


def _launch(model: ModelConfig, bounds: wire.Bounds, fd: int) -> _Child:
    """A fork of this process while it is nothing but its imports, else a new one."""
    environ = expect_parent(dict(os.environ))
    if may_fork():

        def run() -> None:
            os.environ.update(environ)
            wire.main(fd, model, bounds)

        return fork_helper(run, wire.command(fd, model, bounds), keep=fd)
    return subprocess.Popen(
        wire.command(fd, model, bounds),
        pass_fds=[fd],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=environ,
    )


def _died() -> EpdError:
    reason = "a process that prepares prompts died; try again"
    return EpdError(ErrorKind.STAGE_UNAVAILABLE, reason, retry_after_s=1.0)


def _not_loaded() -> EpdError:
    """The first request's prompt was not even looked at."""
    reason = f"loading the tokenizer and processor took more than {LOAD_S:g} s"
    return EpdError(ErrorKind.STAGE_UNAVAILABLE, reason, retry_after_s=1.0)
