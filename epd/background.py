"""Tasks that live as long as their process: one that ends by an error is not missed in silence."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable


async def until_stop(stop: asyncio.Event, tasks: Iterable[asyncio.Task[None]]) -> None:
    """Wait for `stop`.

    Raises:
        What one of the tasks died of.
    """
    stopping = asyncio.create_task(stop.wait(), name="stop signal")
    left = {stopping, *tasks}
    try:
        while not stopping.done():
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        stopping.cancel()
