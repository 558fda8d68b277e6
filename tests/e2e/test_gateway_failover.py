"""The gateway over scripted stages: workers that die, leave or come back, and who goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from epd.errors import EpdError, ErrorKind
from epd.jobs import Stage
from gateway import pipeline
from gateway.checkpoint import Loaded
from protos.epd.v1 import common_pb2
from tests.e2e.fake_stages import Call, fail, hang
from tests.e2e.gateway_house import House, opened, text_of
from tests.waiting import LIMIT_S, soon, until


def dies_once(token: int | None = None) -> Callable[[Call], Awaitable[None]]:
    """A hook: the worker of the first call, or of the first that comes to this token, is gone,
    and later ones are as usual."""
    died = asyncio.Event()

    async def die_once(call: Call) -> None:
        if not died.is_set() and token in (None, call.token):
            died.set()
            await call.worker.stop()
            await hang(call)

    return die_once


async def test_a_dead_encoders_image_goes_to_another(house: House) -> None:
    await house.add(Stage.ENCODE, "encode-1")
    died = asyncio.Event()

    async def die_once(call: Call) -> None:
        if not died.is_set():
            died.set()
            await call.worker.stop()

    house.script.hooks["encode.job"] = die_once
    assert (await house.chat(images=1)).status == 200
    assert len(house.script.jobs_of(Stage.ENCODE)) == 2
    assert len(house.script.jobs_of(Stage.PREFILL)) == 1


async def test_another_decode_takes_over_while_prefill_holds_the_blocks(house: House) -> None:
    await house.add(Stage.DECODE, "decode-1")
    house.script.hooks["decode.fetch"] = fail(ErrorKind.TRANSFER_FAILED, times=1)
    assert (await house.chat()).status == 200
    first, second = house.script.jobs_of(Stage.DECODE)
    assert first == second
    assert len(house.script.jobs_of(Stage.PREFILL)) == 1


async def test_blocks_that_a_lost_decode_may_still_read_are_quarantined(house: House) -> None:
    """Another one took over and is done with them: the first one's word is missing."""
    await house.add(Stage.DECODE, "decode-1")
    house.script.hooks["decode.fetch"] = dies_once()
    assert (await house.chat()).status == 200
    assert len(house.script.jobs_of(Stage.PREFILL)) == 1
    await house.settled()
    assert "prefill: cut" in house.journal
    assert "prefill: half-close" not in house.journal


async def test_a_prefill_that_no_decode_can_read_is_avoided(house: House) -> None:
    """It was sent this prompt's beginning before, so it would be chosen again and again."""
    await house.add(Stage.PREFILL, "prefill-1")
    await house.add(Stage.DECODE, "decode-1")
    owners: list[Any] = []

    async def note(call: Call) -> None:
        owners.append(call.worker)

    async def read(call: Call) -> None:
        if owners[-1] is owners[0]:
            raise EpdError(ErrorKind.TRANSFER_FAILED, "no answer within 3.0 s")

    house.script.hooks |= {"prefill.job": note, "decode.fetch": read}
    messages = [{"role": "user", "content": "one two three four " * 40}]
    assert (await house.chat(messages=messages)).status == 200
    assert len(owners) == 2
    assert len(house.script.jobs_of(Stage.DECODE)) == 3, "both tried, before it was given up"


async def test_a_lost_decode_goes_on_with_what_was_delivered(house: House) -> None:
    await house.add(Stage.DECODE, "decode-1")
    died = asyncio.Event()

    async def die_once(call: Call) -> None:
        if call.token == 4 and not died.is_set():
            died.set()
            await call.worker.stop()

    expected = text_of(await house.stream())
    house.script.jobs.clear()
    house.script.hooks["decode.token"] = die_once
    events = await house.stream(stream_options={"include_usage": True})
    assert text_of(events) == expected
    assert events[-2]["usage"]["completion_tokens"] == len(house.script.output)
    first, second = house.script.jobs_of(Stage.PREFILL)
    assert (first.attempt, second.attempt) == (0, 1)
    assert second.prompt_length == first.prompt_length
    generated = list(second.token_ids[second.prompt_length :])
    assert generated == house.script.output[: len(generated)]
    assert len(generated) == 4
    assert first.nonce != second.nonce


@pytest.mark.parametrize("reason", ["stop", "length"])
async def test_a_decode_lost_after_its_last_token_leaves_a_whole_output(
    house: House, reason: str
) -> None:
    """Nothing in its tokens says so: a grammar was complete, or the context is full."""
    await house.add(Stage.DECODE, "decode-1")
    ends = {"stop": common_pb2.FINISH_REASON_STOP, "length": common_pb2.FINISH_REASON_LENGTH}
    house.script.finish = ends[reason]
    house.script.hooks["decode.finish"] = dies_once()
    reply = (await house.chat()).json()
    assert reply["choices"][0]["finish_reason"] == reason
    assert reply["usage"]["completion_tokens"] == len(house.script.output)
    assert len(house.script.jobs_of(Stage.PREFILL)) == 1


async def test_a_preempted_request_goes_on_with_the_only_decode(house: House) -> None:
    async def preempt(call: Call) -> None:
        if call.token % 2 == 0:
            await fail(ErrorKind.OVERLOADED, "preempted")(call)

    expected = text_of(await house.stream())
    house.script.jobs.clear()
    house.script.hooks["decode.token"] = preempt
    assert text_of(await house.stream()) == expected
    assert len(house.script.jobs_of(Stage.PREFILL)) > 3


@pytest.mark.parametrize("stage", list(Stage))
async def test_an_answer_that_has_begun_waits_where_queues_are_full(
    house: House, stage: Stage
) -> None:
    """Pushed out by decode, and then a queue is full more often than anything may fail."""
    full = fail(ErrorKind.OVERLOADED, "the queue is full", times=pipeline.MAX_ATTEMPTS)

    async def preempt_once(call: Call) -> None:
        if call.token == 4:
            house.script.hooks = {f"{stage}.job": full}
            await fail(ErrorKind.OVERLOADED, "preempted")(call)

    expected = text_of(await house.stream(images=1))
    house.script.hooks["decode.token"] = preempt_once
    assert text_of(await house.stream(images=1)) == expected


async def test_a_request_that_has_not_begun_is_refused_where_queues_are_full(
    house: House,
) -> None:
    house.script.hooks["prefill.job"] = fail(ErrorKind.OVERLOADED, "the queue is full")
    assert (await house.chat()).status == 429
    assert len(house.script.jobs_of(Stage.PREFILL)) == 1


@pytest.mark.parametrize("stage", list(Stage))
async def test_what_waits_at_a_leaving_worker_goes_to_another_at_once(
    house: House, stage: Stage
) -> None:
    """What prefill computed is not computed again: decode's successor reads it, too."""
    await house.add(stage, "another")
    reached = stay_at(house, f"{stage}.job")
    waiting = asyncio.create_task(house.chat(images=1))
    await until(lambda: reached)
    del house.script.hooks[f"{stage}.job"]  # the next one goes on
    reached[0].worker.leaving = True
    assert (await asyncio.wait_for(waiting, LIMIT_S)).status == 200
    jobs = {of: len(house.script.jobs_of(of)) for of in Stage}
    assert jobs == {of: 2 if of is stage else 1 for of in Stage}
    await house.settled()
    assert not [line for line in house.journal if line.endswith("cut")], "nobody quarantines"


@pytest.mark.parametrize("stage", list(Stage))
async def test_a_request_moves_on_as_often_as_workers_leave(house: House, stage: Stage) -> None:
    """A rolling restart of many workers, and a request that waits at each of them."""
    rounds = 5
    for number in range(rounds):
        await house.add(stage, f"another {number}")
    reached = stay_at(house, f"{stage}.job")
    waiting = asyncio.create_task(house.chat(images=1))
    for number in range(rounds):
        await until(lambda: len(reached) > number)  # noqa: B023
        if number == rounds - 1:
            del house.script.hooks[f"{stage}.job"]
        reached[number].worker.leaving = True
    assert (await asyncio.wait_for(waiting, LIMIT_S)).status == 200
    assert len(house.script.jobs_of(stage)) == rounds + 1


@pytest.mark.parametrize("point", ["encode.run", "prefill.first", "decode.fetch"])
async def test_what_a_leaving_worker_has_begun_ends_there(house: House, point: str) -> None:
    stage = Stage(point.partition(".")[0])
    await house.add(stage, "another")
    go = asyncio.Event()
    reached = stay_at(house, point, go)
    waiting = asyncio.create_task(house.chat(images=1))
    await until(lambda: reached)
    reached[0].worker.leaving = True
    await until(lambda: len(house.gateway.registry.live(stage)) == 1)
    go.set()
    assert (await asyncio.wait_for(waiting, LIMIT_S)).status == 200
    assert len(house.script.jobs_of(stage)) == 1


def stay_at(house: House, point: str, until_set: asyncio.Event | None = None) -> list[Call]:
    """Calls stay at this point; returns those that are there."""
    reached: list[Call] = []

    async def wait_here(call: Call) -> None:
        reached.append(call)
        await (until_set or asyncio.Event()).wait()

    house.script.hooks[point] = wait_here
    return reached


async def test_three_attempts_and_no_more(house: House) -> None:
    house.script.hooks["prefill.job"] = fail(ErrorKind.NOT_STARTED)
    reply = await house.chat()
    assert reply.status == 503
    assert [job.attempt for job in house.script.jobs_of(Stage.PREFILL)] == [0, 1, 2]


async def test_a_restarted_worker_serves_again(house: House) -> None:
    worker = next(fake for fake in house.fakes if fake.stage is Stage.PREFILL)
    port = int(worker.address.rpartition(":")[2])
    await worker.stop()
    assert (await house.chat()).status == 503
    await house.add(Stage.PREFILL, "prefill-again", port)
    assert (await house.chat()).status == 200


async def test_a_worker_back_within_a_second_saves_the_request(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Here a worker takes as long to start as the machine wants.
    monkeypatch.setattr(pipeline, "_RETRY_WAIT_S", LIMIT_S)
    worker = next(fake for fake in house.fakes if fake.stage is Stage.PREFILL)
    port = int(worker.address.rpartition(":")[2])
    restarts: list[asyncio.Task[Any]] = []

    async def restart(call: Call) -> None:
        if not restarts:
            restarts.append(asyncio.create_task(again()))
            await hang(call)

    async def again() -> None:
        await worker.stop()
        await asyncio.sleep(0.2)
        await house.add(Stage.PREFILL, "prefill-again", port)

    house.script.hooks["prefill.job"] = restart
    assert (await house.chat()).status == 200
    await restarts[0]


async def test_a_begun_answer_waits_longer_for_a_worker_than_one_without_output(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client can't ask for the rest."""
    monkeypatch.setattr(pipeline, "_RETRY_WAIT_S", 0.01)
    house.script.hooks["decode.token"] = dies_once(token=4)
    asked = asyncio.create_task(house.stream())
    await until(lambda: not house.gateway.registry.live(Stage.DECODE))
    assert (await house.chat()).status == 503, "this one has nothing yet"
    assert not asked.done()
    await house.add(Stage.DECODE, "decode-again")
    events = await asked
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


async def test_an_answer_that_is_sent_whole_does_not_wait_longer_for_its_tokens(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client has nothing yet, and can ask again."""
    monkeypatch.setattr(pipeline, "_RETRY_WAIT_S", 0.01)
    house.script.hooks["decode.token"] = dies_once(token=4)
    with soon(5.0, "a worker, for as long as `gateway.recover_s` says (10 s)"):
        reply = await house.chat()
    assert reply.status == 503
    assert reply.json()["error"]["code"] == "stage_unavailable"


async def test_how_long_a_begun_answer_waits_is_bounded(loaded: Loaded) -> None:
    async with opened(loaded, recover_s=0.0) as house:
        house.script.hooks["decode.token"] = dies_once(token=4)
        events = await house.stream()
        assert events[-2]["error"]["code"] == "stage_unavailable"
        assert events[-1] == "[DONE]"
