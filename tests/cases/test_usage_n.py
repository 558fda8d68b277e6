"""Cases USE-*: usage, logprobs, and several answers to one prompt.

Over scripted stages where the order of events matters, over real ones where numbers do.
"""

from __future__ import annotations

import math
from typing import Any

import grpc.aio
import pytest

from epd.errors import ErrorKind
from epd.jobs import Stage
from protos.epd.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from tests.cases.pictures import body as question
from tests.cases.pictures import file, quad, text
from tests.e2e.cluster import Cluster
from tests.e2e.fake_stages import Call, fail, hang
from tests.e2e.gateway_house import House, raw
from tests.e2e.gateway_house import body as chat_body
from tests.e2e.http_client import Connection, Reply, post
from tests.waiting import until


def texts(reply: Reply) -> list[str]:
    assert reply.status == 200, reply.body
    choices = reply.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return [choice["message"]["content"] for choice in choices]


def streamed(events: list[Any]) -> tuple[dict[int, str], dict[int, str]]:
    """Text and finish reason of each choice; exactly one reason each, nothing after it."""
    content: dict[int, str] = {}
    reasons: dict[int, str] = {}
    assert events[-1] == "[DONE]"
    for event in events[:-1]:
        for choice in event["choices"]:
            index = choice["index"]
            assert index not in reasons, "something came after the finish reason"
            content[index] = content.get(index, "") + choice["delta"].get("content", "")
            if choice["finish_reason"]:
                reasons[index] = choice["finish_reason"]
    return content, reasons


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("images", [0, 2])
async def test_use_07_n_answers_streamed_and_whole(house: House, n: int, images: int) -> None:
    whole = await house.chat(n=n, images=images)
    found = texts(whole)
    assert len(set(found)) == n
    usage = whole.json()["usage"]
    assert usage["completion_tokens"] == n * len(house.script.output)
    one = (await house.chat(images=images)).json()["usage"]
    assert usage["prompt_tokens"] == one["prompt_tokens"]
    options = {"include_usage": True}
    events = await house.stream(n=n, images=images, stream_options=options)
    content, reasons = streamed(events)
    assert [content[i] for i in range(n)] == found
    assert reasons == dict.fromkeys(range(n), "stop")
    assert events[-2]["usage"] == usage


async def test_use_08_one_prefill_and_a_decode_for_each(house: House) -> None:
    await house.chat(n=3)
    await house.settled()
    (prefill,) = house.script.jobs_of(Stage.PREFILL)
    assert prefill.choices == 3
    decodes = house.script.jobs_of(Stage.DECODE)
    assert sorted(job.sampling.choice for job in decodes) == [0, 1, 2]
    assert {job.nonce for job in decodes} == {prefill.nonce}
    assert len({job.sampling.seed for job in decodes}) == 1
    released = house.journal.index("prefill: half-close")
    assert house.journal[:released].count("decode: KvFetched") == 3, "the lease ended too early"


async def test_n_with_one_token_needs_no_decode(house: House) -> None:
    assert len(set(texts(await house.chat(n=3, max_tokens=1)))) == 3
    assert house.script.jobs_of(Stage.DECODE) == []


async def test_one_choice_may_end_with_its_first_token(house: House) -> None:
    tokenizer = house.gateway.service.tokenizer
    rest = tokenizer.decode(house.script.output[1:])
    house.script.output[0] = next(
        token for token in range(400, 900)
        if len(tokenizer.decode([token + 1])) > 3 and tokenizer.decode([token + 1]) not in rest
    )  # fmt: skip
    first = tokenizer.decode([house.script.output_of(1)[0]])
    others = tokenizer.decode(house.script.output)
    content, reasons = streamed(await house.stream(n=3, stop=[first]))
    assert content[1] == ""
    assert content[0] == others
    assert set(reasons) == {0, 1, 2}
    await house.settled()
    assert "decode: Cancel" in house.journal


async def test_a_stop_string_ends_every_choice_and_nothing_is_lost(house: House) -> None:
    whole = house.gateway.service.tokenizer.decode(house.script.output)
    stop = whole[-6:-3]
    at = whole.index(stop)
    content, reasons = streamed(await house.stream(n=2, stop=stop))
    assert content[0] == whole[:at]
    assert reasons == {0: "stop", 1: "stop"}


async def test_a_choice_whose_decode_fails_goes_on_and_repeats_nothing(house: House) -> None:
    await house.add(Stage.DECODE, "decode2")
    broken = [False]

    async def breaks_once(call: Call) -> None:
        if call.job.sampling.choice == 1 and call.token == 4 and not broken[0]:
            broken[0] = True
            await fail(ErrorKind.TRANSFER_FAILED)(call)

    # Of a choice that is torn down between its last token and Finished, the gateway must
    # know that it is whole: by the limit here, since scripted tokens end in no stop id.
    house.script.finish = common_pb2.FINISH_REASON_LENGTH
    limit = len(house.script.output)
    whole = texts(await house.chat(n=3, max_tokens=limit))
    house.script.hooks["decode.token"] = breaks_once
    content, reasons = streamed(await house.stream(n=3, max_tokens=limit))
    assert broken[0]
    assert [content[i] for i in range(3)] == whole
    assert set(reasons.values()) == {"length"}
    retried = [job for job in house.script.jobs_of(Stage.PREFILL) if job.attempt]
    assert {job.choices for job in retried} <= {1}
    # The undisturbed one, the broken one, and the one that went on: by taking over where
    # prefill still held the blocks, else after another prefill.
    decodes = [job for job in house.script.jobs_of(Stage.DECODE) if job.sampling.choice == 1]
    assert len(decodes) == 3


async def test_before_any_output_all_choices_are_tried_again_together(house: House) -> None:
    house.script.hooks["prefill.job"] = fail(ErrorKind.TRANSFER_FAILED, times=1)
    assert len(texts(await house.chat(n=3))) == 3
    assert [job.choices for job in house.script.jobs_of(Stage.PREFILL)] == [3, 3]


async def test_use_07_a_choice_that_fails_for_good_ends_the_others(house: House) -> None:
    async def breaks(call: Call) -> None:
        if call.job.sampling.choice == 1 and call.token == 3:
            await fail(ErrorKind.INTERNAL)(call)
        if call.job.sampling.choice == 0 and call.token == 5:
            await hang(call)

    house.script.hooks["decode.token"] = breaks
    events = await house.stream(n=2)
    assert events[-2]["error"]["code"] == "internal_error"
    assert events[-1] == "[DONE]"
    await house.settled()


async def test_a_client_that_goes_away_frees_all_choices(house: House) -> None:
    house.script.hooks["decode.token"] = hang
    connection = await Connection.send(
        house.http, "POST", "/v1/chat/completions",
        raw(n=4, stream=True),
    )  # fmt: skip
    await connection.head()
    await until(lambda: len(house.script.jobs_of(Stage.DECODE)) >= 4)
    connection.close()
    await house.settled()
    assert house.journal.count("decode: Cancel") == 4


async def test_n_over_grpc(house: House) -> None:
    user = gateway_pb2.Message(
        role=gateway_pb2.ROLE_USER, parts=[gateway_pb2.ContentPart(text="what?")]
    )
    options = gateway_pb2.GenerationOptions(n=2, max_tokens=64)
    request = gateway_pb2.ChatRequest(messages=[user], options=options)
    async with grpc.aio.insecure_channel(house.grpc) as channel:
        events = [event async for event in gateway_pb2_grpc.GatewayStub(channel).Chat(request)]
    joined = {0: "", 1: ""}
    for event in events:
        if event.WhichOneof("kind") == "delta":
            joined[event.delta.choice] += event.delta.text
    assert [joined[0], joined[1]] == texts(await house.chat(n=2))
    ended = [e.choice_finished for e in events if e.WhichOneof("kind") == "choice_finished"]
    assert sorted(e.choice for e in ended) == [0, 1]
    assert {e.reason for e in ended} == {common_pb2.FINISH_REASON_STOP}
    assert events[-1].finished.usage.completion_tokens == 2 * len(house.script.output)


@pytest.mark.parametrize("value", [0, -1, 17, 1.5, "2", True])
async def test_n_is_checked(house: House, value: Any) -> None:
    reply = await house.chat(n=value)
    assert reply.status == 400
    assert reply.json()["error"]["param"] == "n"


async def test_best_of_is_refused_by_name(house: House) -> None:
    reply = await house.chat(best_of=2)
    assert (reply.status, reply.json()["error"]["param"]) == (400, "best_of")


@pytest.mark.parametrize("alternatives", [0, 2])
async def test_use_05_logprobs_have_the_chat_form(house: House, alternatives: int) -> None:
    house.script.alternatives = alternatives
    reply = await house.chat(logprobs=True, top_logprobs=alternatives)
    for entry in reply.json()["choices"][0]["logprobs"]["content"][1:]:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(entry["top_logprobs"]) == alternatives


@pytest.mark.parametrize(
    "fields", [{"logprobs": True, "top_logprobs": 21}, {"logprobs": False, "top_logprobs": 3}]
)
async def test_use_05_impossible_logprobs(house: House, fields: dict[str, Any]) -> None:
    reply = await house.chat(**fields)
    assert (reply.status, reply.json()["error"]["param"]) == (400, "top_logprobs")


def numbers(logprobs: Any) -> list[Any]:
    """Every logprob in either form: of the tokens, and of their alternatives."""
    if "content" in logprobs:
        entries = logprobs["content"]
        alternatives = [top for entry in entries for top in entry["top_logprobs"]]
        return [entry["logprob"] for entry in (*entries, *alternatives)]
    tops = [value for top in logprobs["top_logprobs"] for value in top.values()]
    return [*logprobs["token_logprobs"], *tops]


@pytest.mark.parametrize("value", [-math.inf, math.nan, math.inf])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["chat/completions", "completions"])
async def test_use_06_numbers_that_json_has(
    house: House, route: str, stream: bool, value: float
) -> None:
    house.script.logprob, house.script.alternatives = value, 2
    if route == "completions":
        asked: Any = {"model": "demo", "prompt": "a b", "max_tokens": 64, "logprobs": 2}
    else:
        asked = chat_body(logprobs=True, top_logprobs=2)
    reply = await post(house.http, f"/v1/{route}", asked | {"stream": stream})
    assert reply.status == 200, reply.body
    bodies = reply.events()[:-1] if stream else [reply.json()]
    choices = [choice for body in bodies for choice in body["choices"]]
    found = [n for choice in choices if choice["logprobs"] for n in numbers(choice["logprobs"])]
    made = len(house.script.output)
    assert found == [-9999.0] * (made + 2 * (made - 1)), "prefill's token has no alternatives"


@pytest.mark.parametrize("per_message", [1, 3, 5])
@pytest.mark.parametrize("images", [0, 1])
async def test_use_02_use_03_usage_of_a_stream(house: House, per_message: int, images: int) -> None:
    house.script.tokens_per_message = per_message
    whole = (await house.chat(images=images)).json()["usage"]
    events = await house.stream(images=images, stream_options={"include_usage": True})
    assert events[-2]["usage"] == whole
    assert whole["completion_tokens"] == len(house.script.output)
    assert whole["total_tokens"] == whole["prompt_tokens"] + whole["completion_tokens"]
    assert all(event["usage"] is None for event in events[:-2])


# --- real stages ---------------------------------------------------------------------------


def counted(cluster: Cluster, **fields: Any) -> Any:
    reply = cluster.chat(question(file(quad()), text("What is it?"), **fields))
    assert reply.status == 200, reply.body
    return reply.json


def test_each_choice_is_a_draw_of_its_own_and_repeats(cluster: Cluster) -> None:
    sampled = {"temperature": 2.0, "seed": 5, "max_tokens": 12, "ignore_eos": True}
    both = [counted(cluster, n=3, **sampled) for _ in range(2)]
    found = [[choice["message"]["content"] for choice in each["choices"]] for each in both]
    assert found[0] == found[1]
    assert len(set(found[0])) == 3
    assert found[0][0] == counted(cluster, **sampled)["choices"][0]["message"]["content"]
    assert both[0]["usage"]["completion_tokens"] == 36


def test_n_with_a_grammar(cluster: Cluster) -> None:
    wanted = {"temperature": 2.0, "seed": 1, "max_tokens": 30, "guided_regex": "[ab]{6}"}
    choices = counted(cluster, n=4, **wanted)["choices"]
    found = [choice["message"]["content"] for choice in choices]
    assert all(len(each) == 6 and set(each) <= set("ab") for each in found)
    assert len(set(found)) > 1


def test_use_04_prompt_tokens_hold_the_images(cluster: Cluster) -> None:
    plain = cluster.chat(question(text("What is it?"))).json["usage"]
    first, again = (counted(cluster)["usage"] for _ in range(2))
    details = first["prompt_tokens_details"]
    assert details["image_tokens"] > 0
    assert first["prompt_tokens"] == again["prompt_tokens"]
    # The family writes two markers around each picture's rows.
    assert first["prompt_tokens"] - plain["prompt_tokens"] == details["image_tokens"] + 2
