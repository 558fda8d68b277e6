"""Cases HND-*: who is told what, and when; a gateway over scripted stages.

What the bytes are is `test_handoff_bytes.py`'s business; what is left of a request that ends
early is looked at after every test (the fixture waits until all calls are closed).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from typing import Any

import grpc.aio
import pytest

from epd.errors import ErrorKind
from epd.jobs import Stage
from protos.epd.v1 import common_pb2, decode_pb2, gateway_pb2_grpc, prefill_pb2
from tests.e2e.fake_stages import Call, Fake, fail, hang
from tests.e2e.gateway_house import CHAT, House, ask, raw
from tests.e2e.http_client import Connection
from tests.waiting import LIMIT_S, a_moment, soon, until


async def reached(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), LIMIT_S)


def released_cleanly(house: House) -> bool:
    """Prefill's blocks are reusable at once, and no later than decode stopped reading."""
    last = len(house.journal) - 1 - house.journal[::-1].index("prefill: half-close")
    return "prefill: cut" not in house.journal and "KvFetched" not in house.journal[last:]


@pytest.mark.parametrize("stream", [False, True])
async def test_hnd_01_a_handoff_without_its_position_delta_is_no_answer(
    house: House, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    """0 is a delta like any other, so its absence must be told apart from it."""

    async def without(call: Call) -> None:
        await call.context.write(prefill_pb2.PrefillEvent(admitted=prefill_pb2.Admitted()))
        await hang(call)

    house.script.hooks["prefill.job"] = without
    reply = await house.chat(stream=stream)
    assert reply.status == 500
    assert "position_delta" in caplog.text
    assert "position_delta" not in reply.json()["error"]["message"]
    assert house.script.jobs_of(Stage.DECODE) == []


@pytest.mark.parametrize("stream", [False, True])
async def test_hnd_03_a_first_token_that_ends_is_the_whole_answer(
    house: House, stream: bool
) -> None:
    """Decode reads while prefill computes, so it was asked; it must never start."""
    started: list[Any] = []

    async def watch(call: Call) -> None:
        started.append(await call.next("start"))

    house.script.output = [5]
    house.script.hooks["decode.fetch"] = watch
    if stream:
        events = await house.stream(stream_options={"include_usage": True})
        usage, reason = events[-2]["usage"], events[-3]["choices"][0]["finish_reason"]
    else:
        answer = (await house.chat()).json()
        usage, reason = answer["usage"], answer["choices"][0]["finish_reason"]
    assert (usage["completion_tokens"], reason) == (1, "stop")
    await house.settled()
    assert started == []
    assert "decode: Cancel" in house.journal
    assert released_cleanly(house)


async def test_hnd_03_a_stop_string_in_the_first_token_ends_it_too(house: House) -> None:
    first = house.gateway.service.tokenizer.decode(house.script.output[:1])
    house.script.hooks["decode.token"] = hang
    answer = (await house.chat(stop=first)).json()
    assert answer["choices"][0] | {"message": None} == {
        "index": 0, "message": None, "logprobs": None, "finish_reason": "stop",
    }  # fmt: skip
    assert answer["usage"]["completion_tokens"] == 1
    await house.settled()
    assert "decode: Finished" not in house.journal


async def test_hnd_06_a_prefill_that_gives_up_half_way_starts_no_decode(house: House) -> None:
    """After the first blocks: decode has them, and must not run on them."""
    blocks = [0]

    async def gives_up(call: Call) -> None:
        blocks[0] += 1
        if blocks[0] == 3:
            await until(lambda: "decode: job" in house.journal)
            await fail(ErrorKind.CONTEXT_LENGTH_EXCEEDED, "too long for the pool")(call)

    house.script.hooks["prefill.kv"] = gives_up
    reply = await house.chat()
    assert (reply.status, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
    await house.settled()
    assert "decode: Cancel" in house.journal
    assert "decode: KvFetched" not in house.journal


async def test_hnd_07_decode_is_told_at_once_that_prefill_failed(house: House) -> None:
    """Six requests at a time, five times over; decode waits for blocks that never come."""
    waiting: set[Call] = set()

    async def waits(call: Call) -> None:
        waiting.add(call)
        await hang(call)

    async def fails(call: Call) -> None:
        await until(lambda: any(c.job.request_id == call.job.request_id for c in waiting))
        await fail(ErrorKind.INTERNAL, "prefill broke")(call)

    house.script.hooks |= {"decode.fetch": waits, "prefill.first": fails}
    for _ in range(5):
        with soon(20, instead_of="the deadline of a read, or of a request"):
            replies = await asyncio.gather(*(house.chat() for _ in range(6)))
            await house.settled()
        assert {reply.status for reply in replies} == {500}
    assert len(waiting) == 30
    house.script.hooks.clear()
    assert (await house.chat()).status == 200


async def test_hnd_12_both_ends_know_a_transfer_by_the_gateways_name(house: House) -> None:
    """Over a failover too: each attempt has one name of its own at all stages."""
    house.script.hooks["decode.job"] = fail(ErrorKind.TRANSFER_FAILED, times=1)
    assert (await house.chat(images=1, n=2)).status == 200
    await house.settled()
    names: dict[int, set[tuple[str, int]]] = {}
    for _, job in house.script.jobs:
        names.setdefault(job.attempt, set()).add((job.request_id, job.nonce))
    assert all(len(of_attempt) == 1 for of_attempt in names.values()), names
    nonces = [nonce for of_attempt in names.values() for _, nonce in of_attempt]
    assert len(set(nonces)) == len(names) >= 2
    assert house.journal.count("prefill: half-close") == len(house.script.jobs_of(Stage.PREFILL))


CLIENTS_NAMES: list[dict[str, Any]] = [
    {"request_id": "same"},
    {"transfer_id": "same"},
    {"bootstrap_room": 7, "bootstrap_host": "127.0.0.1"},
    {"kv_transfer_params": {"transfer_id": "same", "do_remote_decode": True}},
]


@pytest.mark.parametrize("fields", CLIENTS_NAMES)
async def test_hnd_13_a_client_names_no_transfer(house: House, fields: dict[str, Any]) -> None:
    reply = await house.chat(**fields)
    assert reply.status == 400
    assert reply.json()["error"]["param"] in fields
    assert house.script.jobs == []


async def test_hnd_13_two_requests_with_one_client_id_are_two_requests(house: House) -> None:
    send = [Connection.send(house.http, "POST", CHAT, raw(), x_request_id="same") for _ in range(4)]
    replies = await asyncio.gather(*[c.reply() for c in await asyncio.gather(*send)])
    assert [reply.status for reply in replies] == [200] * 4
    assert len({job.request_id for job in house.script.jobs_of(Stage.PREFILL)}) == 4
    assert len({job.nonce for job in house.script.jobs_of(Stage.PREFILL)}) == 4


@pytest.mark.parametrize("pause_ms", [0, 1, 2, 5, 10, 25])
async def test_hnd_16_reports_that_come_after_the_end_harm_nobody(
    house: House, caplog: pytest.LogCaptureFixture, pause_ms: int
) -> None:
    """The client leaves just when the transfer ends; decode still says KvFetched and tokens."""
    done = asyncio.Event()

    async def late(call: Call) -> None:
        fetched = decode_pb2.KvFetched(transfer_bytes=1)
        tokens = decode_pb2.Tokens(first_index=1, tokens=[common_pb2.Token(id=301)])
        await call.context.write(decode_pb2.DecodeEvent(kv_fetched=fetched))
        await call.context.write(decode_pb2.DecodeEvent(tokens=tokens))

    async def note(call: Call) -> None:
        done.set()

    house.script.hooks |= {"decode.terminal": late, "decode.fetch": note}
    for _ in range(8):
        done.clear()
        connection = await Connection.send(house.http, "POST", CHAT, raw(stream=True))
        await reached(done)
        await asyncio.sleep(pause_ms / 1000)
        connection.close()
    await house.settled()
    house.script.hooks.clear()
    assert (await house.chat()).status == 200
    gc.collect()  # a task that died of it says so when it goes
    told = [record for record in caplog.records if record.levelno >= logging.ERROR]
    # The scripted stage's own words may come when its call is over.
    assert [record for record in told if record.name.startswith(("gateway", "asyncio"))] == []


async def grpc_code(house: House, timeout_s: float) -> grpc.StatusCode:
    async with grpc.aio.insecure_channel(house.grpc) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in gateway_pb2_grpc.GatewayStub(channel).Chat(ask(), timeout=timeout_s):
                pass
    return caught.value.code()


async def test_hnd_23_a_transfer_that_never_ends_ends_with_the_deadline(house: House) -> None:
    """One deadline under all stages, and both ends are free again soon after it."""
    house.script.hooks["decode.fetch"] = hang
    start = time.monotonic()
    with soon(20, instead_of="a deadline of the gateway's own"):
        assert await grpc_code(house, 2.0) is grpc.StatusCode.DEADLINE_EXCEEDED
        assert time.monotonic() - start > 1.9
        await house.settled()
    assert house.journal[-3:] == ["decode: Cancel", "decode: ReadsTerminal", "prefill: half-close"]


@pytest.mark.parametrize("stream", [False, True])
async def test_hnd_32_a_client_that_leaves_between_prefill_and_decode(
    house: House, stream: bool
) -> None:
    """Prefill has said all it will, decode has not admitted yet: who tells prefill?"""
    between = asyncio.Event()

    async def not_yet(call: Call) -> None:
        await until(lambda: "prefill: FirstToken" in house.journal)
        await a_moment()
        between.set()
        await hang(call)

    house.script.hooks["decode.job"] = not_yet
    connection = await Connection.send(house.http, "POST", CHAT, raw(stream=stream))
    await reached(between)
    connection.close()
    with soon(20, instead_of="a deadline"):
        await house.settled()
    assert house.journal[-1] == "prefill: half-close"


@pytest.mark.parametrize("point", ["prefill.job", "prefill.first", "decode.fetch"])
async def test_lif_09_a_server_that_stops_cancels_its_calls(house: House, point: str) -> None:
    """As a status that is not the client's: nobody who waits for an answer has cancelled."""

    async def stops(call: Call) -> None:
        await call.context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")

    house.script.hooks[point] = stops
    reply = await house.chat()
    assert (reply.status, reply.json()["error"]["code"]) == (503, "stage_unavailable")
    await house.add(Stage.PREFILL, "prefill-1")
    await house.add(Stage.DECODE, "decode-1")
    first = [0]

    async def stops_once(call: Call) -> None:
        first[0] += 1
        if first[0] == 1:
            await stops(call)

    house.script.hooks[point] = stops_once
    assert (await house.chat()).status == 200


async def test_lif_09_a_worker_that_goes_between_choice_and_call(house: House) -> None:
    """Now and then a call finds its worker gone, which comes back elsewhere: each request
    ends, as many as were sent, and those that were not answered say why."""
    for stage in (Stage.PREFILL, Stage.DECODE):
        await house.add(stage, f"{stage}-1")
    calls = [0]
    again: list[asyncio.Task[Fake]] = []

    async def goes(call: Call) -> None:
        calls[0] += 1
        if calls[0] % 9 == 0 and call.worker in house.fakes:
            house.fakes.remove(call.worker)
            again.append(asyncio.create_task(house.add(call.stage, f"again-{calls[0]}")))
            gone.append(call.worker)
            await call.worker.stop()

    gone: list[Fake] = []
    house.script.hooks |= {"prefill.job": goes, "decode.job": goes}
    replies = []
    for _ in range(6):
        replies += await asyncio.gather(*(house.chat() for _ in range(4)))
    await asyncio.gather(*again)
    house.fakes += gone  # the fixture closes them
    assert len(replies) == 24
    assert len(gone) >= 3
    assert [r.body for r in replies if r.status not in (200, 503)] == []
    answered = [reply for reply in replies if reply.status == 200]
    assert len(answered) > 12, "another worker was there"
    assert {r.json()["usage"]["completion_tokens"] for r in answered} == {len(house.script.output)}
