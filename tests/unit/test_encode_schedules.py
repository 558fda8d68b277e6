"""The encode worker under any order of events: every reader gets its own picture."""

from __future__ import annotations

import asyncio
import contextlib

from hypothesis import given, settings
from hypothesis import strategies as st

from encode.ticket import Ticket
from epd.errors import EpdError
from epd.transfer.contract import Handle
from tests.unit.test_encode_worker import BAD, POISON, Bench, job, value_at
from tests.waiting import LIMIT_S

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["submit"] * 4 + ["leave", "release", "lose", "hold", "go", "time", "run"]),
        st.integers(0, 5),
    ),
    max_size=40,
)


@settings(max_examples=80, deadline=None)
@given(STEPS, st.sampled_from([0, 1]))
def test_any_schedule_gives_each_reader_its_own_picture(
    steps: list[tuple[str, int]], cache_mib: int
) -> None:
    asyncio.run(asyncio.wait_for(run_schedule(steps, cache_mib), LIMIT_S))


async def run_schedule(steps: list[tuple[str, int]], cache_mib: int) -> None:
    """Readers that stay, leave, or are lost, at any time; gates, time, and bad pictures."""
    bench = Bench(encode__cache_mib=cache_mib)
    pictures = (1, 2, 3, 4, BAD, POISON)
    waiting: list[tuple[int, Ticket]] = []
    leased: list[tuple[int, Ticket, Handle]] = []

    def look() -> None:
        for entry in list(waiting):
            picture, ticket = entry
            if not ticket.finished.done():
                continue
            waiting.remove(entry)
            if (failed := ticket.finished.exception()) is not None:
                assert isinstance(failed, EpdError)
                assert picture in (BAD, POISON)
                bench.worker.close(ticket, clean=False)
            else:
                leased.append((picture, ticket, bench.worker.announce(ticket)))
        for picture, _, handle in leased:
            assert value_at(handle) == picture
        bench.worker._cache.check_integrity()

    for verb, number in steps:
        if verb == "submit":
            with contextlib.suppress(EpdError):  # full
                waiting.append((pictures[number], bench.worker.submit(job(pictures[number]))))
        elif verb == "leave" and waiting:
            bench.worker.close(waiting.pop(number % len(waiting))[1], clean=False)
        elif verb in ("release", "lose") and leased:
            ticket = leased.pop(number % len(leased))[1]
            bench.worker.close(ticket, clean=verb == "release")
        elif verb == "hold":
            bench.pictures.gate.clear()
        elif verb == "go":
            bench.pictures.gate.set()
        elif verb == "time":
            bench.memory.now += 1
            bench.worker.tick()
        elif verb == "run":
            await asyncio.sleep(0.002 * number)
        look()
    bench.pictures.gate.set()
    while waiting:  # what is leased goes, and whoever waits gets a place
        await asyncio.sleep(0.001)
        look()
        if leased:
            bench.worker.close(leased.pop(0)[1], clean=True)
        bench.memory.now += 1
        bench.worker.tick()
    for _, ticket, _ in leased:
        bench.worker.close(ticket, clean=True)
    await bench.close()
