"""From a checked request to a planned one: images read, prompt built, limits applied.

Everything slow runs off the event loop: images in threads, prompts in `PromptPool`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from epd.config import Config
from epd.errors import EpdError, ErrorKind, invalid
from epd.jobs import ImageItem, SamplingParams
from epd.text.messages import ImageSize
from epd.text.prompt import PromptPlan
from gateway.budget import Hold
from gateway.constraints import Constraint
from gateway.grammars import GrammarChecker
from gateway.images import Picture, PictureReader, Served
from gateway.prompts import PromptPool
from gateway.request import PlannedRequest
from gateway.schema import ChatCall, Generation
from gateway.workers import Limits


class Preparer:
    """Plans requests. `limits` answers with the live workers' capacities."""

    def __init__(
        self, served: Served, config: Config, prompts: PromptPool, limits: Callable[[], Limits]
    ) -> None:
        self._served = served
        self._config = config
        self._prompts = prompts
        self._limits = limits
        self._reader = PictureReader(served, config)
        self._grammars = GrammarChecker(served.spec)

    @property
    def max_context(self) -> int:
        """Prompt and output tokens of one request: the smallest of all limits."""
        bounds = (
            self._served.spec.max_positions,
            self._config.limits.max_context or None,
            self._limits().max_context,
        )
        return min(bound for bound in bounds if bound is not None)

    async def plan(
        self,
        call: ChatCall,
        request_id: str,
        hold: Hold,
        meanwhile: Callable[[], None] | None = None,
    ) -> PlannedRequest:
        """Fetch, decode, hash, render, tokenise and check. `hold` counts what is fetched;
        `meanwhile` is done while the prompt is built elsewhere.

        Raises:
            EpdError: the user's fault, naming the field.
        """
        arrival_ms = int(time.time() * 1000)
        constraint = call.generation.constraint
        await self._check_grammar(constraint, call.salt)
        sources = call.conversation.images
        pictures = await self._reader.read(sources, hold, call.salt)
        sizes = [picture.size for picture in pictures]
        context = self.max_context
        if meanwhile is not None:
            asyncio.get_running_loop().call_soon(meanwhile)  # when the prompt is asked for
        prompt = await self._prompt(call, sizes, context)
        field = "messages" if call.prompt is None else "prompt"
        sampling = self._sampling(call.generation, prompt, context, field)
        return PlannedRequest(
            request_id=request_id,
            token_ids=prompt.token_ids,
            items=tuple(
                _item(index, picture, prompt, len(pictures))
                for index, picture in enumerate(pictures)
            ),
            images=tuple(picture.data for picture in pictures),
            image_params=tuple(source.param for source in sources),
            prompt_param=field,
            grammar_param=constraint.param if constraint else None,
            sampling=sampling,
            choices=call.generation.choices,
            streamed=call.stream,
            salt=call.salt,
            arrival_ms=arrival_ms,
        )

    async def _prompt(self, call: ChatCall, sizes: Sequence[ImageSize], context: int) -> PromptPlan:
        if call.prompt is None:
            shown = call.tools.tools if call.tools else ()
            said = call.conversation.messages
            return await self._prompts.build(said, sizes, context, shown, call.salt)
        if isinstance(call.prompt, str):
            return await self._prompts.encode(call.prompt, context, call.salt)
        if (image := self._served.spec.image_token_id) in call.prompt:
            raise invalid(f"prompt: {image} stands for an image, and there is none", "prompt")
        return PromptPlan(call.prompt, ())

    async def _check_grammar(self, constraint: Constraint | None, client: bytes) -> None:
        """Try it out here first, so that its fault has the name of the client's field."""
        if constraint is None:
            return
        await self._check_grammar(constraint.beside, client)
        grammar = constraint.trial or constraint.grammar
        await self._grammars.check(grammar, constraint.param, client)

    async def close(self) -> None:
        self._grammars.close()
        self._reader.close()
        await self._prompts.close()

    def _sampling(
        self, asked: Generation, prompt: PromptPlan, context: int, field: str
    ) -> SamplingParams:
        """Fill in what the client left open, within what fits."""
        used, output = len(prompt.token_ids), asked.max_tokens
        if used + (output or 1) > context:
            raise _too_long(prompt, output or 1, context, field)
        most_rows = self._limits().max_rows
        if most_rows is not None and prompt.image_tokens > most_rows:
            raise EpdError(
                ErrorKind.CONTEXT_LENGTH_EXCEEDED,
                f"the images make {prompt.image_tokens} tokens, at most {most_rows} are allowed",
                param="messages",
            )
        limits = self._config.limits
        most = output or min(limits.default_max_tokens, context - used)
        if asked.sampling.min_tokens > most:  # a limit that the client didn't give
            reason = f"min_tokens: {asked.sampling.min_tokens} is more than max_tokens, {most}"
            raise invalid(reason, "min_tokens")
        seed = secrets.randbits(63) if asked.seed is None else asked.seed % (1 << 64)
        return replace(
            asked.sampling,
            max_tokens=most,
            seed=seed,
            eos_token_ids=self._served.spec.eos_token_ids,
        )


def _item(index: int, picture: Picture, prompt: PromptPlan, images: int) -> ImageItem:
    rows = prompt.items[index]
    return ImageItem(
        index=index,
        digest=picture.digest,
        rows=rows.rows,
        grid=rows.grid,
        width=picture.size.width,
        height=picture.size.height,
        images_in_request=images,
        max_pixels=picture.max_pixels,
    )


def _too_long(prompt: PromptPlan, output: int, context: int, field: str) -> EpdError:
    used = len(prompt.token_ids)
    return EpdError(
        ErrorKind.CONTEXT_LENGTH_EXCEEDED,
        f"the context holds {context} tokens, but {used + output} were asked for: "
        f"{used - prompt.image_tokens} of text, {prompt.image_tokens} of images, "
        f"{output} of output",
        param=field if used + 1 > context else "max_tokens",
    )
