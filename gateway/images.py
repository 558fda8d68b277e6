"""A request's pictures: read or fetched, checked by their headers, named by a digest.

Fetching is on the event loop, headers are read in a sandbox, the rest in threads. What is
small and plain is done at once on the event loop: to wake a thread or a process and be woken
by it takes longer. Pictures of one request are worked on side by side; the first fault ends
the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

from epd.config import Config
from epd.errors import EpdError, ErrorKind
from epd.images import ImageHeader, item_digest, reduced_size
from epd.models.spec import ModelSpec
from epd.text.messages import ImageSize
from gateway.budget import Hold
from gateway.content import ImageSource
from gateway.fetch import Fetcher, is_web_url
from gateway.headers import HeaderReader, is_plain
from gateway.pictures import file_bytes

_THREADS = 2
_SMALL = 384 << 10
"""Characters of base64, or bytes: 256 KiB of a file, and half a millisecond of work."""
_JOB_OVERHEAD = 4096
"""Bytes of an EncodeJob beside the image."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Served:
    """The model, as far as planning needs it."""

    spec: ModelSpec
    processor_digest: bytes
    image_key: Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture file whose header was read."""

    data: bytes
    size: ImageSize
    """As the model will get it: upright, and reduced to `max_pixels`."""
    max_pixels: int
    """0, or the size that `detail` asks the picture to be reduced to."""
    digest: bytes


@dataclass(slots=True)
class _Fetches:
    """The pictures of one request; a URL that it names twice is one fetch, and one picture."""

    hold: Hold
    salt: bytes
    tasks: dict[str, asyncio.Task[bytes]] = field(default_factory=dict)
    nbytes: int = 0


class PictureReader:
    """Turns what clients send as images into files; knows no prompt."""

    def __init__(self, served: Served, config: Config) -> None:
        self._served = served
        self._config = config
        self._fetcher = Fetcher(config.fetch)
        self._headers = HeaderReader(config)
        self._threads = ThreadPoolExecutor(_THREADS, "image")

    def close(self) -> None:
        self._fetcher.close()
        self._headers.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def read(
        self, sources: Sequence[ImageSource], hold: Hold, salt: bytes = b""
    ) -> list[Picture]:
        """All pictures, in order. `hold` counts those that are fetched; `salt` is the
        tenant's, in every digest.

        Raises:
            EpdError: one of them can't be had or used; `param` names it.
        """
        if not sources:
            return []
        fetches = _Fetches(hold, salt)
        tasks: list[asyncio.Task[Picture]] = []
        try:
            if len(sources) == 1:  # needs no task of its own
                return [await self._one(sources[0], 1, fetches)]
            tasks = [asyncio.create_task(self._one(s, len(sources), fetches)) for s in sources]
            return list(await asyncio.gather(*tasks))
        finally:
            for task in (*tasks, *fetches.tasks.values()):
                task.cancel()

    async def _fetch(self, url: str, param: str, fetches: _Fetches) -> bytes:
        data = await self._fetcher.fetch(url, param, fetches.salt)
        fetches.nbytes += len(data)
        most = self._config.limits.max_body_bytes
        if fetches.nbytes > most:  # by a small request; sent along, they would be refused too
            reason = (
                f"the request's images have {fetches.nbytes} bytes together; {most} are allowed"
            )
            raise EpdError(ErrorKind.IMAGE_TOO_LARGE, reason, param=param)
        fetches.hold.take(len(data))
        return data

    async def _one(self, source: ImageSource, images: int, fetches: _Fetches) -> Picture:
        url = source.value
        if isinstance(url, str) and is_web_url(url):
            if url not in fetches.tasks:
                fetch = self._fetch(url, source.param, fetches)
                fetches.tasks[url] = asyncio.create_task(fetch)
            source = replace(source, value=await fetches.tasks[url])
        small = len(source.value) <= _SMALL
        data = self._file(source) if small else await self._in_thread(self._file, source)
        if small and is_plain(data):
            header = self._headers.read_plain(data, source.param)
        else:
            header = await self._headers.read(data, source.param, fetches.salt)
        named = (source, images, data, header, fetches.salt)
        return self._named(*named) if small else await self._in_thread(self._named, *named)

    async def _in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def _file(self, source: ImageSource) -> bytes:
        data = file_bytes(source, self._config.limits)
        most = self._config.rpc.encode_bytes - _JOB_OVERHEAD
        if len(data) > most:
            reason = f"the image has {len(data)} bytes; {most} are allowed"
            raise EpdError(ErrorKind.IMAGE_TOO_LARGE, reason, param=source.param)
        return data

    def _named(
        self, source: ImageSource, images: int, data: bytes, header: ImageHeader, salt: bytes
    ) -> Picture:
        limits, served = self._config.limits, self._served
        whole = (header.width, header.height)
        size = reduced_size(*whole, limits.low_detail_pixels) if source.low_detail else whole
        max_pixels = limits.low_detail_pixels if size != whole else 0
        digest = item_digest(
            data,
            served.processor_digest,
            served.spec.fingerprint,
            salt,
            served.image_key(images),
            max_pixels,
        )
        return Picture(data, ImageSize(*size, source.param), max_pixels, digest)
