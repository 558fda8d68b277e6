"""From a file's bytes to what the vision tower takes, off the event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from epd import images
from epd.config import Config
from epd.errors import EpdError, ErrorKind
from epd.jobs import EncodeJob, ImageItem
from epd.models.processor import PreparedImage, Processor

PARAM: Final = "job.image"
_READY_AHEAD = 32


class ImagePreparer:
    """Decodes and resizes pictures in threads, and holds them to what was planned.

    At most `READY_AHEAD` pictures (and one a thread) are decoded and not yet
    batched: the queue holds compressed files, not pixels. Take a place before
    `prepare` with `place.acquire()`, give it back when the picture is batched.
    """

    def __init__(self, processor: Processor, config: Config) -> None:
        self._processor = processor
        self._limits = config.limits
        workers = config.encode.decode_workers
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="encode-images")
        self.place = asyncio.Semaphore(_READY_AHEAD + workers)

    async def prepare(self, job: EncodeJob) -> PreparedImage:
        """Tensors of one picture; they own their memory.

        Raises:
            EpdError: INVALID_IMAGE or IMAGE_TOO_LARGE: it can't be decoded, or it is
                not the picture that its header promised.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._prepare, job)

    def _prepare(self, job: EncodeJob) -> PreparedImage:
        item = job.item
        picture = images.reduce(images.decode(job.image, self._limits, PARAM), item.max_pixels)
        if picture.size != (item.width, item.height):
            raise _lying(f"{item.width}x{item.height}", f"{picture.width}x{picture.height}")
        prepared = self._processor.prepare(picture, item.images_in_request)
        check_plan(item, prepared.rows, prepared.grid)
        return prepared

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def check_plan(item: ImageItem, rows: int, grid: tuple[int, ...]) -> None:
    """The prompt was built for `item`; a picture of another shape can't fill it.

    Raises:
        EpdError: INVALID_IMAGE, with both values.
    """
    if rows != item.rows:
        raise _lying(f"{item.rows} rows", f"{rows} rows")
    if grid != item.grid:
        raise _lying(f"grid {item.grid}", f"grid {grid}")


def _lying(planned: str, found: str) -> EpdError:
    return EpdError(
        ErrorKind.INVALID_IMAGE,
        f"the picture is not what its header said: {planned} planned, {found} decoded",
        param=PARAM,
    )
