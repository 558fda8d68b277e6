"""Prompts are built off the event loop: in a few processes, or in one thread.

A process that dies (out of memory, a fault in native code) fails the requests that
were with the pool, typed; the pool is built anew for those that come.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial

from epd.config import ModelConfig
from epd.errors import EpdError, ErrorKind
from epd.forked import may_fork, show_as
from epd.lifetime import die_with_parent
from epd.text.messages import ChatMessage, ImageSize, Tool
from epd.text.prompt import PromptBuilder, PromptPlan
from gateway.checkpoint import Facts, read

_log = logging.getLogger(__name__)
_CLOSE_S = 2.0
_model = ModelConfig()
_read: tuple[Facts, PromptBuilder] | None = None
"""Of a process of the pool: its checkpoint, and what it read of it."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """An EpdError on its way between processes."""

    kind: ErrorKind
    message: str
    param: str | None


def _start(model: ModelConfig) -> None:
    """In a new process of the pool."""
    global _model
    die_with_parent()
    show_as([sys.executable, "-m", "gateway.prompts"])
    # If it is a fork: signals are its own affair, not those of the gateway's event loop.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Ctrl-C goes to the whole group; the gateway drains and then ends the pool.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Taking torch's modules apart takes a second and frees nothing that the kernel does not.
    atexit.register(os._exit, 0)
    _model = model


def _ours() -> tuple[Facts, PromptBuilder]:
    global _read
    if _read is None:
        _read = read(_model)
    return _read


def _facts_here() -> Facts | _Failure:
    try:
        return _ours()[0]
    except EpdError as error:
        return _failure(error)


def _build_here(
    messages: Sequence[ChatMessage],
    sizes: Sequence[ImageSize],
    max_tokens: int,
    tools: Sequence[Tool],
) -> PromptPlan | _Failure:
    return _build(_ours()[1], messages, sizes, max_tokens, tools)


def _encode_here(text: str, max_tokens: int) -> PromptPlan | _Failure:
    return _encode(_ours()[1], text, max_tokens)


def _failure(error: EpdError) -> _Failure:
    return _Failure(error.kind, error.message, error.param)


def _encode(builder: PromptBuilder, text: str, max_tokens: int) -> PromptPlan | _Failure:
    try:
        return builder.encode(text, max_tokens)
    except EpdError as error:
        return _failure(error)


def _build(
    builder: PromptBuilder,
    messages: Sequence[ChatMessage],
    sizes: Sequence[ImageSize],
    max_tokens: int,
    tools: Sequence[Tool],
) -> PromptPlan | _Failure:
    try:
        return builder.build(messages, sizes, max_tokens, tools)
    except EpdError as error:
        return _failure(error)


class PromptPool:
    """Builds prompts for one checkpoint.

    `workers` processes load it anew; 0 means one thread of this process, with `builder`.
    """

    def __init__(
        self, model: ModelConfig, workers: int, builder: PromptBuilder | None = None
    ) -> None:
        assert workers or builder is not None
        self._model = model
        self._workers = workers
        self._builder = builder
        self._pool = self._new_pool()
        self.rebuilt = 0

    async def start(self) -> Facts | None:
        """Load the checkpoint in every process; says what they found.

        Raises:
            EpdError: the checkpoint can't be used, or a process died of it.
        """
        found = await asyncio.gather(
            *(self._run(self._pool, _facts_here) for _ in range(self._workers))
        )
        for facts in found:
            if isinstance(facts, _Failure):
                raise EpdError(facts.kind, facts.message, param=facts.param)
        facts = found[0] if found else None
        assert facts is None or isinstance(facts, Facts)
        return facts

    async def build(
        self,
        messages: Sequence[ChatMessage],
        sizes: Sequence[ImageSize],
        max_tokens: int,
        tools: Sequence[Tool] = (),
    ) -> PromptPlan:
        """See `PromptBuilder.build`.

        Raises:
            EpdError: also STAGE_UNAVAILABLE, if a process of the pool died.
        """
        build = partial(_build, self._builder) if self._builder else _build_here
        return _plan(await self._run(self._pool, build, messages, sizes, max_tokens, tools))

    async def encode(self, text: str, max_tokens: int) -> PromptPlan:
        """See `PromptBuilder.encode`.

        Raises:
            EpdError: also STAGE_UNAVAILABLE, if a process of the pool died.
        """
        encode = partial(_encode, self._builder) if self._builder else _encode_here
        return _plan(await self._run(self._pool, encode, text, max_tokens))

    async def close(self) -> None:
        """End the processes; one that is stuck in a prompt is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        closing = asyncio.to_thread(self._pool.shutdown, wait=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(closing, _CLOSE_S)

    async def _run(self, pool: Executor, function: object, *args: object) -> object:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(pool, function, *args)  # type: ignore[arg-type]
        except BrokenProcessPool as error:
            self._rebuild(pool)
            raise EpdError(
                ErrorKind.STAGE_UNAVAILABLE,
                "a process that prepares prompts died; try again",
                retry_after_s=1.0,
            ) from error

    def _rebuild(self, broken: Executor) -> None:
        if self._pool is not broken:
            return  # another request of the same crash was here first
        _log.error("a prompt process died: starting a new pool")
        self.rebuilt += 1
        broken.shutdown(wait=False)
        self._pool = self._new_pool()

    def _new_pool(self) -> Executor:
        if self._workers == 0:
            return ThreadPoolExecutor(1, "prompt")
        return ProcessPoolExecutor(
            self._workers,
            mp_context=multiprocessing.get_context("fork" if may_fork() else "spawn"),
            initializer=_start,
            initargs=(self._model,),
        )


def _plan(result: object) -> PromptPlan:
    if isinstance(result, _Failure):
        raise EpdError(result.kind, result.message, param=result.param)
    assert isinstance(result, PromptPlan)
    return result
