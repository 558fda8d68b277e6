"""Prompts are built off the event loop: in a few processes, or in one thread.

    request ──> pool: the least busy process, at most two requests each ──socket──> process
                │ the rest waits here, where it can still be given up

A process works on one request at a time, in order. One that dies of it (out of time or
memory, a fault in native code) fails that request, typed; another takes its place for those
behind it and those that come. The event loop itself writes to and reads from the sockets: no
thread stands between, whose wake-ups cost more than a prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from epd.config import GatewayConfig, ModelConfig
from epd.errors import EpdError, ErrorKind, invalid
from epd.text.messages import ChatMessage, ImageSize, Tool
from epd.text.prompt import PromptBuilder, PromptPlan
from epd.turns import Turns
from gateway import prompt_process as wire
from gateway.checkpoint import Facts
from gateway.prompt_lives import NotBegun, PromptProcess, TooLong

_AT_HAND = 2
"""Requests that a process has: one that it works on, one that it finds when that is done."""
_BOUNDS = wire.Bounds(GatewayConfig().prompt_cpu_s, GatewayConfig().prompt_mib)


class PromptPool:
    """Builds prompts for one checkpoint.

    `workers` processes load it anew; 0 means one thread of this process, with `builder`.
    `bounds` are of one prompt, and of processes only.
    """

    def __init__(
        self,
        model: ModelConfig,
        workers: int,
        builder: PromptBuilder | None = None,
        bounds: wire.Bounds = _BOUNDS,
    ) -> None:
        assert workers or builder is not None
        self._builder = builder
        self._thread = None if workers else ThreadPoolExecutor(1, "prompt")
        self._processes = [PromptProcess(model, bounds) for _ in range(workers)]
        self._room = Turns(max(1, workers) * _AT_HAND)

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
            EpdError: the checkpoint can't be used; STAGE_UNAVAILABLE, a process died of it, or
                it takes too long.
        """
        asked = [process.ask(wire.FACTS_REQUEST, _nothing) for process in self._processes]
        try:
            found = [wire.facts_of(reply) for reply in await asyncio.gather(*asked)]
        except TooLong:
            reason = "telling what the checkpoint is took more than gateway.prompt_cpu_s"
            raise EpdError(ErrorKind.STAGE_UNAVAILABLE, reason) from None
        return found[0] if found else None

    async def build(
        self,
        messages: Sequence[ChatMessage],
        sizes: Sequence[ImageSize],
        max_tokens: int,
        tools: Sequence[Tool] = (),
        client: bytes = b"",
    ) -> PromptPlan:
        """See `PromptBuilder.build`. Clients take turns.

        Raises:
            EpdError: also INVALID_REQUEST, it takes too long; STAGE_UNAVAILABLE, its process
                died, or a new one doesn't get loaded.
        """
        if (builder := self._builder) is not None:
            return await self._here(lambda: builder.build(messages, sizes, max_tokens, tools))
        asked = wire.build_request(messages, sizes, max_tokens, tools)
        return await self._ask(asked, "messages", client)

    async def encode(self, text: str, max_tokens: int, client: bytes = b"") -> PromptPlan:
        """See `PromptBuilder.encode`.

        Raises:
            EpdError: as `build`.
        """
        if (builder := self._builder) is not None:
            return await self._here(lambda: builder.encode(text, max_tokens))
        return await self._ask(wire.encode_request(text, max_tokens), "prompt", client)

    async def close(self) -> None:
        """End the processes; one that is stuck in a prompt is not waited for."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        await asyncio.gather(*(process.close() for process in self._processes))

    async def _here(self, work: Callable[[], PromptPlan]) -> PromptPlan:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _ask(self, request: Mapping[str, Any], param: str, client: bytes) -> PromptPlan:
        while True:
            await self._room.acquire(client)
            process = min(self._processes, key=lambda process: process.at_hand)
            try:
                # Given up or not: what a process was asked takes room until it has answered.
                return wire.plan_of(await process.ask(request, self._room.release))
            except NotBegun:
                continue
            except TooLong:
                limit = f"{process.bounds.cpu_s:g} s"
                reason = f"{param}: the prompt takes more than {limit} to build"
                raise invalid(reason, param) from None


def _nothing() -> None:
    """Facts take no room: they are asked for once, at the start."""
