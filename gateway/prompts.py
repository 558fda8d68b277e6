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
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial

from epd.errors import EpdError, ErrorKind
from epd.lifetime import die_with_parent
from epd.text.messages import ChatMessage, ImageSize, Tool
from epd.text.prompt import PromptBuilder, PromptPlan

_log = logging.getLogger(__name__)
_CLOSE_S = 2.0
_builder: PromptBuilder | None = None
"""The process's (or thread pool's) own builder."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """An EpdError on its way between processes."""

    kind: ErrorKind
    message: str
    param: str | None


def _start(path: str) -> None:
    """In a new process of the pool."""
    global _builder
    die_with_parent()
    # Ctrl-C goes to the whole group; the gateway drains and then ends the pool.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Taking torch's modules apart takes a second and frees nothing that the kernel does not.
    atexit.register(os._exit, 0)
    _builder = PromptBuilder.load(path)


def _warm() -> None:
    assert _builder is not None


def _build_here(
    messages: Sequence[ChatMessage],
    sizes: Sequence[ImageSize],
    max_tokens: int,
    tools: Sequence[Tool],
) -> PromptPlan | _Failure:
    assert _builder is not None
    return _build(_builder, messages, sizes, max_tokens, tools)


def _encode_here(text: str, max_tokens: int) -> PromptPlan | _Failure:
    assert _builder is not None
    return _encode(_builder, text, max_tokens)


def _encode(builder: PromptBuilder, text: str, max_tokens: int) -> PromptPlan | _Failure:
    try:
        return builder.encode(text, max_tokens)
    except EpdError as error:
        return _Failure(error.kind, error.message, error.param)


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
        return _Failure(error.kind, error.message, error.param)


class PromptPool:
    """Builds prompts for one checkpoint.

    `workers` processes load it anew; 0 means one thread of this process, with `builder`.
    """

    def __init__(self, path: str, workers: int, builder: PromptBuilder) -> None:
        self._path = path
        self._workers = workers
        self._builder = builder
        self._pool = self._new_pool()
        self.rebuilt = 0

    async def start(self) -> None:
        """Load the processor in every process.

        Raises:
            EpdError: a process died of it.
        """
        await asyncio.gather(*(self._run(self._pool, _warm) for _ in range(self._workers)))

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
        build = _build_here if self._workers else partial(_build, self._builder)
        return _plan(await self._run(self._pool, build, messages, sizes, max_tokens, tools))

    async def encode(self, text: str, max_tokens: int) -> PromptPlan:
        """See `PromptBuilder.encode`.

        Raises:
            EpdError: also STAGE_UNAVAILABLE, if a process of the pool died.
        """
        encode = _encode_here if self._workers else partial(_encode, self._builder)
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
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start,
            initargs=(self._path,),
        )


def _plan(result: object) -> PromptPlan:
    if isinstance(result, _Failure):
        raise EpdError(result.kind, result.message, param=result.param)
    assert isinstance(result, PromptPlan)
    return result
