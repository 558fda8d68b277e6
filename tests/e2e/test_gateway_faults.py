"""The gateway over scripted stages: errors, silence, deadlines."""

from __future__ import annotations

import asyncio

import pytest

from epd.config import Config
from epd.errors import EpdError, ErrorKind
from epd.jobs import Stage
from gateway.checkpoint import Loaded
from protos.epd.v1 import common_pb2, decode_pb2
from tests.e2e.fake_stages import Call, fail, hang
from tests.e2e.gateway_house import CHAT, House, config, long_answer, opened, raw
from tests.e2e.http_client import Connection, get
from tests.waiting import soon


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
        assert await modalities(house) == ["text"]
        reply = await house.chat(images=1)  # no 503: to come again would not help
        error = reply.json()["error"]
        assert (reply.status, error["param"]) == (400, "messages[0].content[0].image_url.url")
        assert "text alone" in error["message"]
        await house.add(Stage.ENCODE)  # all the same
        assert await modalities(house) == ["text", "image"]
        assert (await house.chat(images=1)).status == 200
        await house.settled()
    finally:
        await house.close()


async def modalities(house: House) -> list[str]:
    model: dict[str, list[str]] = (await get(house.http, "/v1/models")).json()["data"][0]
    return model["input_modalities"]


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


async def test_the_deadline_ends_everything(loaded: Loaded) -> None:
    async with opened(loaded, {"request_deadline_s": 2.0}) as house:
        house.script.hooks["decode.fetch"] = hang
        reply = await house.chat()
        assert reply.status == 504
        await house.settled()
        assert "prefill: half-close" in house.journal


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
