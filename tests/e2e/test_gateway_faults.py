"""The gateway over scripted stages: failover, errors, deadlines."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from epd.config import Config
from epd.errors import EpdError, ErrorKind
from epd.jobs import Stage
from gateway import pipeline
from gateway.main import Loaded
from protos.epd.v1 import common_pb2, decode_pb2
from tests.e2e.fake_stages import Call, fail, hang
from tests.e2e.gateway_house import CHAT, House, config, long_answer, raw
from tests.e2e.http_client import Connection, get
from tests.e2e.test_gateway_bounds import opened
from tests.waiting import LIMIT_S, soon, until


def text_of(events: list[Any]) -> str:
    return "".join(
        event["choices"][0]["delta"].get("content", "")
        for event in events
        if event != "[DONE]" and event.get("choices")
    )


# --- faults --------------------------------------------------------------------------------


async def test_no_worker_is_503_at_once(empty: House) -> None:
    with soon(10, instead_of="the request's deadline"):
        reply = await empty.chat()
    assert reply.status == 503
    assert reply.json()["error"]["code"] == "stage_unavailable"
    assert int(reply.headers["retry-after"]) >= 1


async def test_ready_says_which_stage_is_missing(empty: House) -> None:
    assert (await get(empty.http, "/ready")).status == 503
    for stage in Stage:
        await empty.add(stage)
    reply = await get(empty.http, "/ready")
    assert reply.status == 200
    assert reply.json()["live_workers"] == {"encode": 1, "prefill": 1, "decode": 1}


async def test_without_encoders_on_purpose_text_is_served(loaded: Loaded) -> None:
    tree = config().model_dump()
    tree["serve"]["encode"] = 0
    house = House(loaded, Config.model_validate(tree))
    await house.start()
    try:
        assert (await get(house.http, "/ready")).status == 503
        for stage in (Stage.PREFILL, Stage.DECODE):
            await house.add(stage)
        assert (await get(house.http, "/ready")).status == 200
        assert (await house.chat()).status == 200
        reply = await house.chat(images=1)
        assert (reply.status, reply.json()["error"]["code"]) == (503, "stage_unavailable")
        await house.settled()
    finally:
        await house.close()


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


async def test_a_decode_that_is_full_is_429(house: House) -> None:
    house.script.hooks["decode.job"] = fail(ErrorKind.OVERLOADED)
    reply = await house.chat()
    assert (reply.status, len(house.script.jobs_of(Stage.PREFILL))) == (429, 1)


async def test_the_log_says_that_the_answer_failed_not_that_the_client_left(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "gateway")
    house.script.hooks["prefill.job"] = fail(ErrorKind.NOT_STARTED)
    assert (await house.chat()).status == 503
    ended = [vars(record) for record in caplog.records if record.message == "answer ended"]
    assert [record["outcome"] for record in ended] == ["not_started"]


async def test_three_attempts_and_no_more(house: House) -> None:
    house.script.hooks["prefill.job"] = fail(ErrorKind.NOT_STARTED)
    reply = await house.chat()
    assert reply.status == 503
    assert [job.attempt for job in house.script.jobs_of(Stage.PREFILL)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (ErrorKind.OVERLOADED, 429),
        (ErrorKind.STAGE_UNAVAILABLE, 503),
        (ErrorKind.TRANSFER_FAILED, 503),
        (ErrorKind.CONTEXT_LENGTH_EXCEEDED, 400),
        (ErrorKind.DEADLINE_EXCEEDED, 504),
        (ErrorKind.CONTRACT_MISMATCH, 500),
        (ErrorKind.CHECKSUM_MISMATCH, 500),
    ],
)
@pytest.mark.parametrize("stage", ["prefill.job", "decode.job"])
async def test_a_stages_error_becomes_a_status(
    house: House, kind: ErrorKind, status: int, stage: str
) -> None:
    house.script.hooks[stage] = fail(kind, "the stage's own words")
    reply = await house.chat()
    assert reply.status == status
    assert reply.json()["error"]["code"] == str(kind)
    # Which words go out: test_gateway_disclosure.py.
    own = reply.json()["error"]["message"] == "the stage's own words"
    assert own == (status == 400)


@pytest.mark.parametrize(
    ("param", "status", "code"),
    [
        ("kv_ready.handle", 500, "contract_mismatch"),
        ("start", 500, "contract_mismatch"),
        ("job.token_ids", 400, "invalid_request"),
    ],
)
async def test_what_a_stage_finds_wrong_with_another_is_not_the_clients_fault(
    house: House, param: str, status: int, code: str
) -> None:
    async def refuse(call: Call) -> None:
        raise EpdError(ErrorKind.INVALID_REQUEST, "is wrong", param=param)

    house.script.hooks["decode.job"] = refuse
    reply = await house.chat()
    assert (reply.status, reply.json()["error"]["code"]) == (status, code)
    # The client is told what it can mend; what two stages disagree about is for the log.
    assert ("is wrong" in reply.json()["error"]["message"]) == (status == 400)


async def test_an_unforeseen_fault_of_a_stage_tells_no_internals(house: House) -> None:
    async def bug(call: Call) -> None:
        raise ValueError("a secret prompt")

    house.script.hooks["prefill.job"] = bug
    reply = await house.chat()
    assert reply.status == 500
    assert b"secret" not in reply.body


async def test_a_picture_that_only_encode_finds_bad_is_named(house: House) -> None:
    house.script.hooks["encode.job"] = fail(ErrorKind.INVALID_IMAGE, "truncated")
    reply = await house.chat(images=2)
    assert reply.status == 400
    error = reply.json()["error"]
    assert error["code"] == "invalid_image"
    assert error["param"] in [f"messages[0].content[{j}].image_url.url" for j in (0, 1)]


@pytest.mark.parametrize("kind", [ErrorKind.CHECKSUM_MISMATCH, ErrorKind.INTERNAL])
async def test_a_fault_in_mid_stream_ends_with_one_error_event(
    house: House, kind: ErrorKind
) -> None:
    async def break_at_four(call: Call) -> None:
        if call.token == 4:
            await fail(kind)(call)

    house.script.hooks["decode.token"] = break_at_four
    events = await house.stream()
    assert events[-1] == "[DONE]"
    assert events[-2]["error"]["code"] == str(kind)
    assert sum("error" in event for event in events[:-1]) == 1
    assert not any(
        event["choices"][0]["finish_reason"] for event in events[:-2] if event.get("choices")
    )


async def test_a_stopped_worker_is_noticed_by_its_silence(loaded: Loaded) -> None:
    """SIGSTOP breaks no connection: only heartbeats stop."""

    async def stop(call: Call) -> None:
        call.worker.beating.clear()
        await hang(call)

    async with opened(loaded, dead_s=0.5) as house:
        house.script.hooks["decode.fetch"] = stop
        with soon(20, instead_of="the request's deadline"):
            reply = await house.chat()
        assert reply.status == 503
        assert (await house.chat()).status == 503
        assert (await get(house.http, "/ready")).json()["live_workers"]["decode"] == 0


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


async def test_the_deadline_ends_everything(loaded: Loaded) -> None:
    limits = {"limits": {"request_deadline_s": 2.0}}
    tree = {**config().model_dump(), **limits}
    house = House(loaded, Config.model_validate(tree))
    await house.start()
    try:
        for stage in Stage:
            await house.add(stage)
        house.script.hooks["decode.fetch"] = hang
        reply = await house.chat()
        assert reply.status == 504
        await house.settled()
        assert "prefill: half-close" in house.journal
    finally:
        await house.close()


async def test_a_gap_in_the_tokens_is_a_fault(house: House) -> None:
    async def skip(call: Call) -> None:
        if call.token == 3:
            call.worker.script.hooks.pop("decode.token")
            token = common_pb2.Token(id=300)
            tokens = decode_pb2.Tokens(first_index=7, tokens=[token])
            await call.context.write(decode_pb2.DecodeEvent(tokens=tokens))

    house.script.hooks["decode.token"] = skip
    reply = await house.chat()
    assert reply.status == 500


async def test_repeated_tokens_are_dropped(house: House) -> None:
    expected = (await house.chat()).json()["choices"][0]["message"]["content"]

    async def repeat(call: Call) -> None:
        index = call.token - 1
        tokens = [common_pb2.Token(id=house.script.output[index])]
        message = decode_pb2.Tokens(first_index=index, tokens=tokens)
        await call.context.write(decode_pb2.DecodeEvent(tokens=message))

    house.script.hooks["decode.token"] = repeat
    reply = (await house.chat()).json()
    assert reply["choices"][0]["message"]["content"] == expected
    assert reply["usage"]["completion_tokens"] == len(house.script.output)


async def test_a_slow_client_holds_decode_back(house: House) -> None:
    """Buffers are bounded: decode can't run far ahead of a client that doesn't read."""
    made = long_answer(house)
    request = raw(stream=True, logprobs=True, top_logprobs=20, max_tokens=900)
    connection = await Connection.send(house.http, "POST", CHAT, request, buffer=1 << 10)
    await connection.head()
    halted = -1
    while made[0] != halted or not halted:
        halted = made[0]
        await asyncio.sleep(1)
    connection.close()
    assert 0 < halted < len(house.script.output) * 0.9
