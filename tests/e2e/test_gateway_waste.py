"""A key that gives up its requests waits at the gateway's door while another key is served."""

from __future__ import annotations

import asyncio

import grpc.aio

from gateway.app import counts
from gateway.checkpoint import Loaded
from protos.epd.v1 import gateway_pb2_grpc
from tests.e2e.fake_stages import Call, hang
from tests.e2e.gateway_house import CHAT, House, ask, body, opened, raw
from tests.e2e.http_client import Connection, post
from tests.e2e.test_gateway_access import KEY, OTHER, bearer
from tests.waiting import LIMIT_S, a_moment, until

ROUNDS, AT_ONCE, STAY_S = 3, 5, 0.5
"""More wasted than a key may waste (`gateway.waste.MOST_S`)."""


async def storm(house: House) -> None:
    """All are given up while prefill works on them."""
    house.script.hooks["prefill.job"] = hang
    for number in range(ROUNDS):
        clients = [
            await Connection.send(house.http, "POST", CHAT, raw(), **bearer(KEY))
            for _ in range(AT_ONCE)
        ]
        await until_begun(house, AT_ONCE * (number + 1))
        await asyncio.sleep(STAY_S)
        for client in clients:
            client.close()
        await house.settled()
    del house.script.hooks["prefill.job"]


def begun(house: House) -> int:
    return house.journal.count("prefill: job")


async def until_begun(house: House, requests: int) -> None:
    await until(lambda: begun(house) == requests)


def held(house: House) -> int:
    return counts(house.gateway.service)["held_back"]


async def test_what_waits_at_the_door_costs_nothing_and_is_let_in_later(loaded: Loaded) -> None:
    async with opened(loaded, api_keys=(KEY, OTHER), hold_s=LIMIT_S) as house:
        await storm(house)
        house.script.hooks["decode.token"] = hang
        other = await Connection.send(house.http, "POST", CHAT, raw(stream=True), **bearer(OTHER))
        await other.head()
        before = begun(house)
        waiting = await Connection.send(house.http, "POST", CHAT, raw(), **bearer(KEY))
        await until(lambda: held(house) == 1)
        waiting.close()
        await until(lambda: held(house) == 0)
        async with grpc.aio.insecure_channel(house.grpc) as channel:
            stub = gateway_pb2_grpc.GatewayStub(channel)
            call = stub.Chat(ask(), metadata=tuple(bearer(KEY).items()), timeout=LIMIT_S)
            later = asyncio.create_task(post(house.http, CHAT, body(), **bearer(KEY)))
            await until(lambda: held(house) == 2)
            await a_moment()
            assert begun(house) == before, "nothing is done for them"
            del house.script.hooks["decode.token"]
            other.close()
            assert (await asyncio.wait_for(later, LIMIT_S)).status == 200
            assert [event.WhichOneof("kind") async for event in call][-1] == "finished"


async def test_nobody_is_held_for_longer_than_configured(loaded: Loaded) -> None:
    async with opened(loaded, api_keys=(KEY, OTHER), hold_s=0.2) as house:
        await storm(house)
        reached = asyncio.Event()

        async def wait_here(call: Call) -> None:
            reached.set()
            await hang(call)

        house.script.hooks["decode.token"] = wait_here
        other = await Connection.send(house.http, "POST", CHAT, raw(stream=True), **bearer(OTHER))
        await asyncio.wait_for(reached.wait(), LIMIT_S)
        del house.script.hooks["decode.token"]  # the next one goes on
        assert (await post(house.http, CHAT, body(), **bearer(KEY))).status == 200
        other.close()
