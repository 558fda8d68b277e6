"""From a checked request to a planned one: images read, prompt built, limits applied.

Everything slow runs off the event loop: images in threads, prompts in `PromptPool`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from epd.config import Config
from epd.errors import EpdError, ErrorKind
from epd.images import item_digest, read_header
from epd.jobs import ImageItem, SamplingParams
from epd.models.spec import ModelSpec
from epd.text.messages import ImageSize
from epd.text.prompt import PromptPlan
from gateway.content import ImageSource
from gateway.pictures import file_bytes
from gateway.prompts import PromptPool
from gateway.request import PlannedRequest
from gateway.schema import ChatCall, Generation
from gateway.workers import Limits

_IMAGE_THREADS = 2
_JOB_OVERHEAD = 4096
"""Bytes of an EncodeJob beside the image."""


@dataclass(frozen=True, slots=True)
class Served:
    """The model, as far as planning needs it."""

    spec: ModelSpec
    processor_digest: bytes
    image_key: Callable[[int], int]


@dataclass(frozen=True, slots=True)
class _Picture:
    data: bytes
    size: ImageSize
    digest: bytes


class Preparer:
    """Plans requests. `limits` answers with the live workers' capacities."""

    def __init__(
        self, served: Served, config: Config, prompts: PromptPool, limits: Callable[[], Limits]
    ) -> None:
        self._served = served
        self._config = config
        self._prompts = prompts
        self._limits = limits
        self._threads = ThreadPoolExecutor(_IMAGE_THREADS, "image")

    @property
    def max_context(self) -> int:
        """Prompt and output tokens of one request: the smallest of all limits."""
        bounds = (
            self._served.spec.max_positions,
            self._config.limits.max_context or None,
            self._limits().max_context,
        )
        return min(bound for bound in bounds if bound is not None)

    async def plan(self, call: ChatCall, request_id: str) -> PlannedRequest:
        """Decode, hash, render, tokenise and check.

        Raises:
            EpdError: the user's fault, naming the field.
        """
        arrival_ms = int(time.time() * 1000)
        sources = call.conversation.images
        pictures = await self._pictures(sources)
        sizes = [picture.size for picture in pictures]
        context = self.max_context
        prompt = await self._prompts.build(call.conversation.messages, sizes, context)
        sampling = self._sampling(call.generation, prompt, context)
        return PlannedRequest(
            request_id=request_id,
            token_ids=prompt.token_ids,
            items=tuple(
                _item(index, picture, prompt, len(pictures))
                for index, picture in enumerate(pictures)
            ),
            images=tuple(picture.data for picture in pictures),
            image_params=tuple(source.param for source in sources),
            sampling=sampling,
            arrival_ms=arrival_ms,
        )

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._prompts.close()

    async def _pictures(self, sources: tuple[ImageSource, ...]) -> list[_Picture]:
        loop = asyncio.get_running_loop()
        work = [
            loop.run_in_executor(self._threads, self._read, source, len(sources))
            for source in sources
        ]
        return list(await asyncio.gather(*work))

    def _read(self, source: ImageSource, images: int) -> _Picture:
        limits, served = self._config.limits, self._served
        data = file_bytes(source, limits)
        if len(data) + _JOB_OVERHEAD > self._config.rpc.encode_bytes:
            raise EpdError(
                ErrorKind.IMAGE_TOO_LARGE,
                f"the image has more than {self._config.rpc.encode_bytes - _JOB_OVERHEAD} bytes",
                param=source.param,
            )
        header = read_header(data, limits, source.param)
        digest = item_digest(
            data,
            served.processor_digest,
            served.spec.fingerprint,
            b"",
            served.image_key(images),
        )
        return _Picture(data, ImageSize(header.width, header.height, source.param), digest)

    def _sampling(self, asked: Generation, prompt: PromptPlan, context: int) -> SamplingParams:
        """Fill in what the client left open, within what fits."""
        used, output = len(prompt.token_ids), asked.max_tokens
        if used + (output or 1) > context:
            raise _too_long(prompt, output or 1, context)
        most_rows = self._limits().max_rows
        if most_rows is not None and prompt.image_tokens > most_rows:
            raise EpdError(
                ErrorKind.CONTEXT_LENGTH_EXCEEDED,
                f"the images make {prompt.image_tokens} tokens, at most {most_rows} are allowed",
                param="messages",
            )
        seed = secrets.randbits(63) if asked.seed is None else asked.seed % (1 << 64)
        limits = self._config.limits
        return replace(
            asked.sampling,
            max_tokens=output or min(limits.default_max_tokens, context - used),
            seed=seed,
            eos_token_ids=self._served.spec.eos_token_ids,
        )


def _item(index: int, picture: _Picture, prompt: PromptPlan, images: int) -> ImageItem:
    rows = prompt.items[index]
    return ImageItem(
        index=index,
        digest=picture.digest,
        rows=rows.rows,
        grid=rows.grid,
        width=picture.size.width,
        height=picture.size.height,
        images_in_request=images,
    )


def _too_long(prompt: PromptPlan, output: int, context: int) -> EpdError:
    used = len(prompt.token_ids)
    return EpdError(
        ErrorKind.CONTEXT_LENGTH_EXCEEDED,
        f"the context holds {context} tokens, but {used + output} were asked for: "
        f"{used - prompt.image_tokens} of text, {prompt.image_tokens} of images, "
        f"{output} of output",
        param="messages" if used + 1 > context else "max_tokens",
    )
