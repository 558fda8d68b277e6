"""Calls that the gateway opens before it knows what they are for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from epd.errors import EpdError, ErrorKind
from epd.jobs import Stage
from gateway.prompts import PromptPool
from gateway.streams import Connections
from protos.epd.v1.prefill_pb2 import PrefillRequest
from tests.e2e.fake_stages import Call, Fake, hang
from tests.e2e.gateway_house import CHAT, House, raw
from tests.e2e.http_client import Connection, post
from tests.waiting import a_moment, until


class Building:
    """The building of prompts, held up until `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = asyncio.Event()
        self.go = asyncio.Event()
        build = PromptPool.build

        async def held(pool: PromptPool, *given: Any) -> Any:
            self.begun.set()
            await self.go.wait()
            return await build(pool, *given)

        monkeypatch.setattr(PromptPool, "build", held)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Stage]:
    """The stages of all calls that the gateway opens."""
    found: list[Stage] = []
    opening = Connections.open

    def noted(connections: Connections, stage: Stage, *given: Any) -> Any:
        found.append(stage)
        return opening(connections, stage, *given)

    monkeypatch.setattr(Connections, "open", noted)
    return found


def of(house: House, stage: Stage) -> Fake:
    return next(fake for fake in house.fakes if fake.stage is stage)


async def test_prefills_call_is_open_while_the_prompt_is_built(
    house: House, opened: list[Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    building = Building(monkeypatch)
    asked = asyncio.create_task(house.chat())
    await until(lambda: bool(of(house, Stage.PREFILL).calls))
    assert not building.go.is_set()
    building.go.set()
    assert (await asked).status == 200
    assert opened == [Stage.PREFILL, Stage.DECODE]


async def test_ids_need_no_building_and_get_one_call(house: House, opened: list[Stage]) -> None:
    body = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 4}
    reply = await post(house.http, "/v1/completions", body)
    assert reply.status == 200, reply.body
    await house.settled()
    assert opened == [Stage.PREFILL, Stage.DECODE]


async def test_where_there_is_a_choice_the_prompt_makes_it(
    house: House, opened: list[Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    await house.add(Stage.PREFILL, "another")
    building = Building(monkeypatch)
    asked = asyncio.create_task(house.chat())
    await building.begun.wait()
    await a_moment()
    assert opened == []
    building.go.set()
    assert (await asked).status == 200


async def test_a_request_that_is_refused_after_all_leaves_no_call(
    house: House, opened: list[Stage]
) -> None:
    reply = await house.chat(max_tokens=1_000_000)
    assert reply.status == 400
    await house.settled()
    assert opened == [Stage.PREFILL]
    assert house.script.jobs == []
    assert (await house.chat()).status == 200


async def test_a_client_that_leaves_meanwhile_leaves_no_call(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    building = Building(monkeypatch)
    connection = await Connection.send(house.http, "POST", CHAT, raw(stream=True))
    await until(lambda: bool(of(house, Stage.PREFILL).calls))
    connection.close()
    await house.settled()
    assert not building.go.is_set()
    assert house.script.jobs == []


async def test_an_encoders_call_is_open_while_prefill_looks_what_it_lacks(
    house: House, opened: list[Stage]
) -> None:
    look = asyncio.Event()

    async def wait(call: Call) -> None:
        await look.wait()

    house.script.hooks["prefill.job"] = wait
    asked = asyncio.create_task(house.chat(images=2))
    await until(lambda: bool(of(house, Stage.ENCODE).calls))
    assert house.script.jobs_of(Stage.ENCODE) == []
    look.set()
    assert (await asked).status == 200
    assert sorted(opened) == sorted([Stage.PREFILL, Stage.ENCODE, Stage.ENCODE, Stage.DECODE])
    # It was encoded: most likely prefill has it now, and lacks nothing.
    opened.clear()
    house.script.missing = []
    assert (await house.chat(images=2)).status == 200
    assert opened == [Stage.PREFILL, Stage.DECODE]


async def test_an_encoder_that_is_not_needed_is_let_go_at_once(house: House) -> None:
    house.script.missing = []
    decoding = asyncio.Event()

    async def wait(call: Call) -> None:
        await decoding.wait()

    house.script.hooks["decode.token"] = wait
    asked = asyncio.create_task(house.chat(images=1))
    await until(lambda: bool(of(house, Stage.DECODE).calls))
    await until(lambda: not of(house, Stage.ENCODE).calls)
    decoding.set()
    assert (await asked).status == 200
    assert house.script.jobs_of(Stage.ENCODE) == []


@pytest.mark.parametrize("how", ["leaves", "dies"])
async def test_a_prefill_that_goes_meanwhile_gets_no_job(
    house: House, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    building = Building(monkeypatch)
    first = of(house, Stage.PREFILL)
    asked = asyncio.create_task(house.chat())
    await until(lambda: bool(first.calls))
    if how == "leaves":
        first.leaving = True
    else:
        await first.stop()
    await until(lambda: not first.calls)  # it need not wait for who has said nothing
    await house.add(Stage.PREFILL, "another")
    building.go.set()
    assert (await asked).status == 200
    assert next(step for step in house.journal if step.endswith(": job")) == "another: job"


async def test_a_prefill_that_joins_meanwhile_and_is_chosen_leaves_no_call_to_the_first(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for as long as the answer takes."""
    building = Building(monkeypatch)
    house.script.hooks["decode.token"] = hang
    first = of(house, Stage.PREFILL)
    connection = await Connection.send(house.http, "POST", CHAT, raw(stream=True, images=1))
    await until(lambda: bool(first.calls))
    await house.add(Stage.PREFILL, "another")  # and has less to do
    building.go.set()
    await until(lambda: bool(of(house, Stage.DECODE).calls))
    assert "another: job" in house.journal
    await until(lambda: not first.calls)
    assert house.gateway.service.inflight == 1
    connection.close()
    await house.settled()


async def test_a_call_that_broke_meanwhile_is_opened_anew(
    house: House, opened: list[Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    building = Building(monkeypatch)
    prefill = of(house, Stage.PREFILL)
    asked = asyncio.create_task(house.chat())
    await until(lambda: bool(prefill.calls))
    (call,) = prefill.calls
    call.jobs.put_nowait(PrefillRequest())  # it takes nothing but a job
    (worker,) = house.gateway.registry.live(Stage.PREFILL)
    await until(lambda: not worker.streams)
    building.go.set()
    assert (await asked).status == 200
    assert opened == [Stage.PREFILL, Stage.PREFILL, Stage.DECODE]


async def test_a_prompt_that_prefill_refuses_leaves_no_call_to_an_encoder(house: House) -> None:
    look = asyncio.Event()

    async def refuse(call: Call) -> None:
        await look.wait()
        raise EpdError(ErrorKind.INVALID_REQUEST, "scripted")

    house.script.hooks["prefill.job"] = refuse
    asked = asyncio.create_task(house.chat(images=1))
    await until(lambda: bool(of(house, Stage.ENCODE).calls))
    look.set()
    assert (await asked).status != 200
    await house.settled()
    assert house.script.jobs_of(Stage.ENCODE) == []
