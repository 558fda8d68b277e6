"""Who waits at the gateway's door, against synthetic clients and an exact clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from gateway.waste import MOST_S, OTHERS, Door, Visit
from tests.unit.virtual_time import run


def door(held_s: float = 5.0) -> Door:
    return Door(held_s, asyncio.get_running_loop().time)


async def give_up(entrance: Door, name: str, seconds: float) -> None:
    visit = await entrance.enter(name)
    await asyncio.sleep(seconds)
    visit.end(given_up=True)


async def storm(entrance: Door, name: str = "storm", seconds: float = 2 * MOST_S) -> None:
    """Requests that are all given up, until there is no credit left."""
    for _ in range(40):
        await give_up(entrance, name, seconds / 40)


async def entered(entrance: Door, name: str) -> tuple[Visit, float]:
    """And how long it was held."""
    loop = asyncio.get_running_loop()
    since = loop.time()
    visit = await entrance.enter(name)
    return visit, loop.time() - since


def test_a_storm_waits_while_others_are_served() -> None:
    async def main() -> None:
        entrance = door()
        await storm(entrance)
        steady, held = await entered(entrance, "steady")
        assert held == 0
        waiting = asyncio.create_task(entered(entrance, "storm"))
        await asyncio.sleep(1)
        assert entrance.held == 1
        steady.end(answered=True)
        visit, held = await waiting
        assert held == pytest.approx(1), "nobody else is there now"
        visit.end(given_up=True)
        assert entrance.held == 0

    run(main())


def test_nobody_is_held_longer_than_allowed() -> None:
    async def main() -> None:
        entrance = door(held_s=3.0)
        await storm(entrance)
        steady = await entrance.enter("steady")
        visit, held = await entered(entrance, "storm")
        assert held == pytest.approx(3)
        assert entrance.held == 0
        visit.end()
        steady.end()

    run(main())


def test_who_leaves_the_queue_leaves_nothing() -> None:
    async def main() -> None:
        entrance = door()
        await storm(entrance)
        steady = await entrance.enter("steady")
        waiting = [asyncio.create_task(entrance.enter("storm")) for _ in range(3)]
        await asyncio.sleep(0.1)
        waiting[1].cancel()
        await asyncio.sleep(0)
        assert entrance.held == 2
        steady.end(answered=True)
        waiting[0].cancel()  # let in already, and doesn't know it yet
        await asyncio.sleep(0.1)
        assert waiting[0].cancelled()
        waiting[2].result().end()
        assert entrance.held == 0
        assert not any(client.running for client in entrance._clients.values())

    run(main())


def test_a_storm_costs_others_no_more_than_its_share() -> None:
    """A closed load, and so many requests that are given up that they could take it all."""

    async def main() -> None:
        entrance, loop = door(), asyncio.get_running_loop()
        await storm(entrance)
        served = wasted = 0.0

        async def steady() -> None:
            nonlocal served
            while True:
                visit = await entrance.enter("steady")
                await asyncio.sleep(0.2)
                visit.end(answered=True)
                served += 0.2

        async def leave() -> None:
            nonlocal wasted
            visit, since = None, loop.time()
            try:
                async with asyncio.timeout(0.3):
                    visit = await entrance.enter("storm")
                    since = loop.time()
                    await asyncio.sleep(60)
            except TimeoutError:
                if visit is not None:
                    visit.end(given_up=True)
                    wasted += loop.time() - since

        async with asyncio.TaskGroup() as tasks:
            clients = [tasks.create_task(steady()) for _ in range(4)]
            for _ in range(2000):
                tasks.create_task(leave())
                await asyncio.sleep(0.05)
            for client in clients:
                client.cancel()
        assert served > 350
        assert 0 < wasted < 1.5 * OTHERS * served

    run(main())


async def below_half(entrance: Door) -> None:
    """A third of its requests is given up, and the others are short."""
    for _ in range(40):
        await give_up(entrance, "client", 5)
        for _ in range(2):
            (await entrance.enter("client")).end(answered=True)


async def delivered(entrance: Door) -> None:
    """Its people read a part of the answer, and leave then."""
    for _ in range(40):
        visit = await entrance.enter("client")
        visit.delivered()
        await asyncio.sleep(10)
        visit.end(given_up=True)


async def failed(entrance: Door) -> None:
    for _ in range(40):
        visit = await entrance.enter("client")
        await asyncio.sleep(10)
        visit.end()


@pytest.mark.parametrize("history", [below_half, delivered, failed])
def test_who_is_never_held(history: Callable[[Door], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        entrance = door()
        other = await entrance.enter("other")
        await history(entrance)
        _, held = await entered(entrance, "client")
        assert held == 0
        other.end()

    run(main())


def test_a_client_alone_is_never_held_nor_anybody_where_it_is_off() -> None:
    async def main() -> None:
        entrance = door()
        await storm(entrance)
        assert (await entered(entrance, "storm"))[1] == 0
        entrance = door(held_s=0)
        await storm(entrance)
        await entrance.enter("steady")
        assert (await entered(entrance, "storm"))[1] == 0

    run(main())


def test_waiting_for_answers_earns_credit_again() -> None:
    async def main() -> None:
        entrance = door()
        await storm(entrance)
        steady = await entrance.enter("steady")
        for _ in range(20):
            visit, _ = await entered(entrance, "storm")
            await asyncio.sleep(10)
            visit.end(answered=True)
        _, held = await entered(entrance, "storm")
        assert held == 0
        steady.end()

    run(main())


def test_the_first_word_about_an_end_counts() -> None:
    async def main() -> None:
        entrance = door()
        visit = await entrance.enter("client")
        visit.end(answered=True)
        visit.end(given_up=True)
        assert entrance._clients["client"].given_up == 0
        assert entrance._clients["client"].running == 0

    run(main())
