"""Places are given by turns of clients, and none is lost when somebody leaves."""

from __future__ import annotations

import asyncio

from epd.turns import Turns


async def started(turns: Turns, *clients: str) -> tuple[list[asyncio.Task[None]], list[str]]:
    """Pieces of work that wait behind a place that is taken; the order they are let in."""
    order: list[str] = []

    async def work(client: str) -> None:
        async with turns.place(client):
            order.append(client)

    tasks = [asyncio.create_task(work(client)) for client in clients]
    await asyncio.sleep(0)  # each stands in the queue now
    return tasks, order


async def test_one_clients_many_are_not_before_anothers_one() -> None:
    turns = Turns(1)
    await turns.acquire("a")
    tasks, order = await started(turns, "a", "a", "a", "a", "b", "b")
    assert order == []
    turns.release()
    await asyncio.gather(*tasks)
    assert order[:4].count("b") == 2, "a was given something before b had come"
    assert order[0] == "b"


async def test_within_a_client_by_arrival() -> None:
    turns = Turns(1)
    order: list[int] = []

    async def work(number: int) -> None:
        async with turns.place("a"):
            order.append(number)

    await asyncio.gather(*map(work, range(5)))
    assert order == [0, 1, 2, 3, 4]


async def test_places_at_once_and_no_more() -> None:
    turns = Turns(2)
    await turns.acquire("a")
    await turns.acquire("b")
    waiting = asyncio.create_task(turns.acquire("c"))
    await asyncio.sleep(0)
    assert not waiting.done()
    turns.release()
    await waiting


async def test_who_leaves_while_waiting_takes_no_place() -> None:
    turns = Turns(1)
    await turns.acquire("a")
    (gone, stays), order = await started(turns, "b", "c")
    gone.cancel()
    turns.release()  # before `gone` itself has run
    await asyncio.gather(gone, stays, return_exceptions=True)
    assert order == ["c"]
    await turns.acquire("d")


async def test_who_is_let_in_and_gone_at_once_gives_it_back() -> None:
    turns = Turns(1)
    await turns.acquire("a")
    (gone, stays), order = await started(turns, "b", "c")
    turns.release()  # lets `gone` in, which has not run yet
    gone.cancel()
    await asyncio.gather(gone, stays, return_exceptions=True)
    assert order == ["c"]
    await turns.acquire("d")
