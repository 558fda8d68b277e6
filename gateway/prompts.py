"""Prompts are built off the event loop: in a few processes, or in one thread.

    request ──> pool: the least busy process, at most two requests each ──socket──> process
                │ the rest waits here, where it can still be given up

A process that dies (out of memory, a fault in native code) fails the requests that it had,
typed; another takes its place for those that come. The event loop itself writes to and
reads from the sockets: no thread stands between, whose wake-ups cost more than a prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import orjson

from epd.config import ModelConfig
from epd.errors import EpdError, ErrorKind
from epd.forked import fork_helper, may_fork
from epd.forkserver import Process
from epd.lifetime import expect_parent
from epd.text.messages import ChatMessage, ImageSize, Tool
from epd.text.prompt import PromptBuilder, PromptPlan
from gateway import prompt_process as wire
from gateway.checkpoint import Facts

_Child = subprocess.Popen[bytes] | Process
_log = logging.getLogger(__name__)
_CLOSE_S = 2.0
_AT_HAND = 2
"""Requests that a process has: one that it works on, one that it finds when that is done."""


class PromptPool:
    """Builds prompts for one checkpoint.

    `workers` processes load it anew; 0 means one thread of this process, with `builder`.
    """

    def __init__(
        self, model: ModelConfig, workers: int, builder: PromptBuilder | None = None
    ) -> None:
        assert workers or builder is not None
        self._builder = builder
        self._thread = None if workers else ThreadPoolExecutor(1, "prompt")
        self._processes = [_Process(model) for _ in range(workers)]
        self._room = asyncio.Semaphore(max(1, workers) * _AT_HAND)

    @property
    def rebuilt(self) -> int:
        """How many processes died and were replaced."""
        return sum(process.deaths for process in self._processes)

    @property
    def at_hand(self) -> int:
        """Requests that processes have, also those that nobody waits for any more."""
        return sum(process.at_hand for process in self._processes)

    async def start(self) -> Facts | None:
        """Load the checkpoint in every process; says what they found.

        Raises:
            EpdError: the checkpoint can't be used, or a process died of it.
        """
        asked = [process.ask(wire.FACTS_REQUEST, _nothing) for process in self._processes]
        found = [wire.facts_of(reply) for reply in await asyncio.gather(*asked)]
        return found[0] if found else None

    async def build(
        self,
        messages: Sequence[ChatMessage],
        sizes: Sequence[ImageSize],
        max_tokens: int,
        tools: Sequence[Tool] = (),
    ) -> PromptPlan:
        """See `PromptBuilder.build`.

        Raises:
            EpdError: also STAGE_UNAVAILABLE, if its process died.
        """
        if (builder := self._builder) is not None:
            return await self._here(lambda: builder.build(messages, sizes, max_tokens, tools))
        return await self._ask(wire.build_request(messages, sizes, max_tokens, tools))

    async def encode(self, text: str, max_tokens: int) -> PromptPlan:
        """See `PromptBuilder.encode`.

        Raises:
            EpdError: also STAGE_UNAVAILABLE, if its process died.
        """
        if (builder := self._builder) is not None:
            return await self._here(lambda: builder.encode(text, max_tokens))
        return await self._ask(wire.encode_request(text, max_tokens))

    async def close(self) -> None:
        """End the processes; one that is stuck in a prompt is not waited for."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        await asyncio.gather(*(process.close() for process in self._processes))

    async def _here(self, work: Callable[[], PromptPlan]) -> PromptPlan:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _ask(self, request: Mapping[str, Any]) -> PromptPlan:
        await self._room.acquire()
        process = min(self._processes, key=lambda process: process.at_hand)
        # Given up or not: what a process was asked takes room until it has answered.
        return wire.plan_of(await process.ask(request, self._room.release))


@dataclass(frozen=True, slots=True)
class _Asked:
    reply: asyncio.Future[Mapping[str, Any]]
    over: Callable[[], None]


class _Process:
    """One process and what it was asked, in order. Started when it is first needed, and
    again when it is needed after its death."""

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
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
            EpdError: STAGE_UNAVAILABLE, it died or can't be started.
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
            self._life = await _Life.start(self._model, self._on_death)
            return self._life
        finally:
            self._starting = None

    def _on_death(self) -> None:
        self._life = None
        if not self._closed:
            _log.error("a prompt process died: the next request starts another")
            self.deaths += 1

    async def close(self) -> None:
        self._closed = True
        if self._life is not None:
            await self._life.end()


class _Life(asyncio.Protocol):
    """The connection to one life of a process; replies come in the order of requests."""

    def __init__(self, process: _Child, on_death: Callable[[], None]) -> None:
        self._process = process
        self._on_death = on_death
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self.asked: deque[_Asked] = deque()

    @classmethod
    async def start(cls, model: ModelConfig, on_death: Callable[[], None]) -> _Life:
        """Raises OSError where no process can be started."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = _launch(model, theirs.fileno())
        life = cls(process, on_death)
        await asyncio.get_running_loop().create_unix_connection(lambda: life, sock=ours)
        return life

    async def ask(self, request: Mapping[str, Any], over: Callable[[], None]) -> Mapping[str, Any]:
        """See `_Process.ask`."""
        assert self._transport is not None
        if self._transport.is_closing():
            over()
            raise _died()
        asked = _Asked(asyncio.get_running_loop().create_future(), over)
        self.asked.append(asked)
        self._transport.write(wire.frame(request))
        return await asked.reply

    async def end(self) -> None:
        """Kill it; what it was asked fails."""
        assert self._transport is not None
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
            asked = self.asked.popleft()
            asked.over()
            if not asked.reply.done():  # else given up
                asked.reply.set_result(reply)

    def connection_lost(self, error: Exception | None) -> None:
        self._process.kill()  # it may have closed its end and live on
        asyncio.get_running_loop().run_in_executor(None, self._process.wait)
        self._on_death()
        while self.asked:
            asked = self.asked.popleft()
            asked.over()
            if not asked.reply.done():
                asked.reply.set_exception(_died())


def _launch(model: ModelConfig, fd: int) -> _Child:
    """A fork of this process while it is nothing but its imports, else a new one."""
    environ = expect_parent(dict(os.environ))
    if may_fork():

        def run() -> None:
            os.environ.update(environ)
            wire.main(fd, model)

        return fork_helper(run, wire.command(fd, model), keep=fd)
    return subprocess.Popen(
        wire.command(fd, model),
        pass_fds=[fd],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=environ,
    )


def _nothing() -> None:
    """Facts take no room: they are asked for once, at the start."""


def _died() -> EpdError:
    reason = "a process that prepares prompts died; try again"
    return EpdError(ErrorKind.STAGE_UNAVAILABLE, reason, retry_after_s=1.0)
