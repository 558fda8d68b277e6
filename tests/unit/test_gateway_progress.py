"""The output of one request over its attempts: in order, once, and never lost."""

from __future__ import annotations

import asyncio

import pytest

from epd.errors import EpdError
from epd.jobs import SampledToken
from gateway.progress import Progress
from gateway.request import Event, NewTokens
from gateway.timeline import Timeline


def tokens(*ids: int) -> list[SampledToken]:
    return [SampledToken(token_id) for token_id in ids]


def delivered(queue: asyncio.Queue[Event]) -> list[int]:
    found: list[int] = []
    while not queue.empty():
        event = queue.get_nowait()
        assert isinstance(event, NewTokens)
        found += [token.id for token in event.tokens]
    return found


async def test_repeats_are_dropped_and_gaps_are_faults() -> None:
    queue: asyncio.Queue[Event] = asyncio.Queue()
    progress = Progress(queue, Timeline())
    await progress.extend(0, tokens(1, 2))
    await progress.extend(1, tokens(2, 3))
    await progress.extend(0, tokens(1))
    with pytest.raises(EpdError):
        await progress.extend(4, tokens(5))
    assert delivered(queue) == [1, 2, 3]
    assert progress.output == tokens(1, 2, 3)


async def test_a_slow_client_gets_tokens_in_order() -> None:
    """Prefill's token and decode's come from two tasks; the queue is full."""
    queue: asyncio.Queue[Event] = asyncio.Queue(1)
    progress = Progress(queue, Timeline())
    await progress.extend(0, tokens(0))
    waiting = [asyncio.create_task(progress.extend(i, tokens(i))) for i in range(1, 8)]
    await asyncio.sleep(0)
    found: list[int] = []
    while len(found) < 8:
        found += delivered(queue)
        await asyncio.sleep(0)
    await asyncio.gather(*waiting)
    assert found == list(range(8))


async def test_what_was_not_delivered_is_generated_again() -> None:
    """A stage fails while a token waits for the client: the next attempt makes it anew."""
    queue: asyncio.Queue[Event] = asyncio.Queue(1)
    progress = Progress(queue, Timeline())
    await progress.extend(0, tokens(0))
    blocked = asyncio.create_task(progress.extend(1, tokens(1)))
    await asyncio.sleep(0)
    blocked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await blocked
    assert progress.output == tokens(0)
    assert delivered(queue) == [0]
    await progress.extend(1, tokens(1))
    assert delivered(queue) == [1]
