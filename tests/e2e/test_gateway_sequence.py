"""The gateway over scripted stages: which call follows which."""

from __future__ import annotations

import asyncio

from epd.jobs import Stage
from tests.e2e.fake_stages import Call
from tests.e2e.gateway_house import CHAT, House, before, raw, text_of
from tests.e2e.http_client import Connection
from tests.waiting import a_moment, until

# --- the sequence ------------------------------------------------------------------------


async def test_one_image_goes_through_all_stages_in_order(house: House) -> None:
    reply = await house.chat(images=1, timeline=True)
    assert reply.status == 200, reply.body
    await house.settled()
    order = (
        ("prefill: job", "encode: job"),
        ("encode: job", "encode: ItemReady 0"),
        ("encode: ItemReady 0", "prefill: EmbeddingFetched 0"),
        ("prefill: EmbeddingFetched 0", "encode: half-close"),
        ("prefill: EmbeddingFetched 0", "decode: job"),
        ("prefill: FirstToken", "prefill: half-close"),
        ("decode: KvFetched", "prefill: half-close"),
        ("decode: KvFetched", "decode: Finished"),
    )
    assert [pair for pair in order if not before(house.journal, *pair)] == []
    assert len(house.journal) == len({step for pair in order for step in pair})
    answer = reply.json()
    assert answer["usage"]["completion_tokens"] == len(house.script.output)
    assert answer["usage"]["prompt_tokens_details"]["image_tokens"] > 0
    names = [phase["name"] for phase in answer["timeline"]["phases"]]
    assert set(names) == {
        "plan",
        "admission",
        "prefill",
        "encode[0]",
        "embedding transfer[0]",
        "kv transfer",
        "decode",
    }


async def test_jobs_agree_with_each_other(house: House) -> None:
    await house.chat(images=1, seed=7, temperature=0.5)
    await house.settled()
    (encode,), (prefill,), (decode,) = (house.script.jobs_of(stage) for stage in Stage)
    assert encode.nonce == prefill.nonce == decode.nonce
    assert encode.request_id == prefill.request_id == decode.request_id
    assert encode.item == prefill.items[0] == decode.items[0]
    assert prefill.token_ids == decode.token_ids
    assert prefill.sampling == decode.sampling
    assert prefill.sampling.seed == 7
    assert decode.position_delta == -3


async def test_text_only_never_touches_encode(house: House) -> None:
    assert (await house.chat()).status == 200
    assert house.script.jobs_of(Stage.ENCODE) == []


async def test_one_token_never_touches_decode(house: House) -> None:
    reply = await house.chat(max_tokens=1)
    assert reply.json()["choices"][0]["finish_reason"] == "length"
    assert reply.json()["usage"]["completion_tokens"] == 1
    assert house.script.jobs_of(Stage.DECODE) == []
    assert not house.script.jobs_of(Stage.PREFILL)[0].decode_follows


async def test_a_first_token_that_ends_needs_no_start(house: House) -> None:
    house.script.output = [5]
    reply = await house.chat()
    assert reply.json()["choices"][0]["finish_reason"] == "stop"
    await house.settled()
    assert house.journal[-3:] == ["decode: Cancel", "decode: ReadsTerminal", "prefill: half-close"]


async def test_only_missing_images_are_encoded(house: House) -> None:
    house.script.missing = [1]
    assert (await house.chat(images=3)).status == 200
    assert [job.item.index for job in house.script.jobs_of(Stage.ENCODE)] == [1]


async def test_images_are_encoded_at_the_same_time(house: House) -> None:
    together = asyncio.Barrier(3)

    async def meet(call: Call) -> None:
        await together.wait()

    house.script.hooks["encode.job"] = meet
    assert (await house.chat(images=3)).status == 200


async def test_stream_and_whole_answer_are_the_same(house: House) -> None:
    whole = (await house.chat(images=1)).json()
    events = await house.stream(images=1, stream_options={"include_usage": True})
    assert text_of(events) == whole["choices"][0]["message"]["content"] != ""
    assert events[-1] == "[DONE]"
    assert events[-2]["usage"] == whole["usage"]
    assert events[-3]["choices"][0]["finish_reason"] == "stop"
    assert {event["id"] for event in events[:-1]} == {events[0]["id"]}


async def test_first_token_is_sent_before_decode_has_fetched(house: House) -> None:
    go = asyncio.Event()

    async def wait(call: Call) -> None:
        await go.wait()

    house.script.hooks["decode.fetch"] = wait
    connection = await Connection.send(house.http, "POST", CHAT, raw(stream=True))
    await connection.head()
    events = connection.events()
    assert (await anext(events))["choices"][0]["delta"]["role"] == "assistant"
    assert (await anext(events))["choices"][0]["delta"]["content"] != ""
    go.set()
    assert [event async for event in events][-1] == "[DONE]"


async def test_decode_may_have_everything_before_the_first_token(house: House) -> None:
    fetched = asyncio.Event()

    async def wait(call: Call) -> None:
        await until(lambda: "decode: KvFetched" in house.journal)
        await a_moment()
        fetched.set()

    house.script.hooks["prefill.first"] = wait
    reply = await house.chat()
    assert fetched.is_set()
    assert reply.json()["usage"]["completion_tokens"] == len(house.script.output)
    await house.settled()
    assert before(house.journal, "prefill: FirstToken", "prefill: half-close")
