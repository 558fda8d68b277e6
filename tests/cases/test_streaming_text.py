"""Cases STR-*: what streams say, token by token, over scripted stages.

Every split of a text into tokens must give the text of the whole answer; the units below
are tested in `tests/unit/test_text_output.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bench.gateway.clients import request, run
from epd.client import AsyncClient, user
from epd.errors import ErrorKind
from epd.jobs import Stage
from epd.obs import metrics
from gateway.answer import Part
from gateway.checkpoint import Loaded
from gateway.completions import CompletionEncoder
from gateway.openai import Encoder
from protos.epd.v1 import common_pb2
from tests.e2e.fake_stages import Call, fail, hang
from tests.e2e.gateway_house import House, body, opened
from tests.e2e.http_client import Connection, post
from tests.readings import reading
from tests.waiting import until

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
WORLD = "á👩‍🚀漢字🇨🇭ไทย"


def script(house: House, text: str, seed: int) -> None:
    """Tokens of `text`, cut at random places (a seed of 0: one character each)."""
    tokenizer, chance = house.gateway.service.tokenizer, random.Random(seed)
    pieces, at = [], 0
    while at < len(text):
        size = chance.randint(1, 4) if seed else 1
        pieces.append(text[at : at + size])
        at += size
    house.script.output = [
        token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False).ids
    ]


def deltas(events: list[Any]) -> list[str]:
    return [
        choice["delta"].get("content", "")
        for event in events
        if event != "[DONE]"
        for choice in event.get("choices", ())
    ]


def terminal(events: list[Any]) -> Any:
    """The one terminal of a stream: exactly one, then [DONE], and nothing after it."""
    assert events.count("[DONE]") == 1
    assert events[-1] == "[DONE]"
    found = [
        e for e in events[:-1] if "error" in e or any(c["finish_reason"] for c in e["choices"])
    ]
    assert len(found) == 1, found
    rest = events[events.index(found[0]) + 1 : -1]
    assert all(event["choices"] == [] for event in rest), "only usage may follow"
    return found[0]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("stop", "kept"),
    [
        ("DEFGHIJ", "ABC"),
        (ALPHABET[2:], "AB"),
        (["xy", "CDX", "MNO"], ALPHABET[:12]),
        (["DE", "DEF"], "ABC"),
        (["Q?", "ZZ"], ALPHABET),
    ],
)
async def test_str_01_str_03_nothing_of_a_stop_string_is_sent(
    house: House, seed: int, stop: Any, kept: str
) -> None:
    script(house, ALPHABET, seed)
    events = await house.stream(stop=stop)
    whole = (await house.chat(stop=stop)).json()
    assert "".join(deltas(events)) == kept == whole["choices"][0]["message"]["content"]
    assert terminal(events)["choices"][0]["finish_reason"] == "stop"
    so_far = ""
    for delta in deltas(events):
        so_far += delta
        assert kept.startswith(so_far)


async def test_str_02_held_text_is_let_out_at_the_end(house: House) -> None:
    script(house, ALPHABET, 1)
    for finish, name in (
        (common_pb2.FINISH_REASON_STOP, "stop"),
        (common_pb2.FINISH_REASON_LENGTH, "length"),
    ):
        house.script.finish = finish
        events = await house.stream(stop="XYZ?")
        assert "".join(deltas(events)) == ALPHABET
        assert terminal(events)["choices"][0]["finish_reason"] == name


async def test_str_03_a_match_cancels_decode_and_counts_what_was_sampled(house: House) -> None:
    script(house, ALPHABET, 0)
    made = [0]

    async def up_to_ten(call: Call) -> None:
        made[0] = call.token
        if call.token == 10:
            await hang(call)  # until it is cancelled

    house.script.hooks["decode.token"] = up_to_ten
    usage = (await house.chat(stop="CDE")).json()["usage"]
    await house.settled()
    assert usage["completion_tokens"] == 5
    assert made[0] <= 10
    assert "decode: Cancel" in house.journal
    reply = await house.chat(include_stop_str_in_output=True)
    assert reply.json()["error"]["param"] == "include_stop_str_in_output"


@pytest.mark.parametrize("stop", [None, "MN", "漢"])
@pytest.mark.parametrize("per_message", [1, 3])
async def test_str_04_logprobs_of_a_chunk_are_its_text(
    house: House, stop: str | None, per_message: int
) -> None:
    script(house, f"AB{WORLD}{ALPHABET}", 2)
    house.script.tokens_per_message = per_message
    for event in (await house.stream(stop=stop, logprobs=True))[:-1]:
        for choice in event["choices"]:
            entries = (choice["logprobs"] or {"content": ()})["content"]
            joined = b"".join(bytes(entry["bytes"]) for entry in entries)
            assert joined.decode() == choice["delta"].get("content", "")


@pytest.mark.parametrize("per_message", [1, 2, 3, 7])
async def test_str_05_characters_are_never_broken(house: House, per_message: int) -> None:
    script(house, WORLD, 0)
    house.script.tokens_per_message = per_message
    found = deltas(await house.stream())
    assert "".join(found) == WORLD
    assert "\ufffd" not in "".join(found)
    house.script.output = house.script.output[:-1]  # ends in half a character
    cut = deltas(await house.stream())
    assert "".join(cut) == house.gateway.service.tokenizer.decode(house.script.output)
    assert "\ufffd" not in "".join(cut[:-2]), "decided before the end"


async def test_str_06_a_prompt_that_ends_in_half_a_character_is_not_sent_back(
    house: House,
) -> None:
    tokenizer = house.gateway.service.tokenizer
    ids = tokenizer.encode("PROMPT \U0001f336", add_special_tokens=False).ids
    expected = tokenizer.decode(house.script.output)
    for cut in range(1, len(ids) + 1):
        asked = {"model": "demo", "prompt": ids[:cut]}
        reply = await post(house.http, "/v1/completions", asked)
        assert reply.json()["choices"][0]["text"] == expected


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (ErrorKind.OVERLOADED, 429),
        (ErrorKind.STAGE_UNAVAILABLE, 503),
        (ErrorKind.CONTEXT_LENGTH_EXCEEDED, 400),
        (ErrorKind.DEADLINE_EXCEEDED, 504),
        (ErrorKind.INTERNAL, 500),
    ],
)
async def test_str_07_str_10_every_fault_has_its_status_or_one_event(
    house: House, kind: ErrorKind, status: int
) -> None:
    house.script.hooks["prefill.job"] = fail(kind)
    assert (await house.chat(stream=True)).status == status
    del house.script.hooks["prefill.job"]

    async def breaks(call: Call) -> None:
        if call.token >= 3:
            await fail(kind)(call)

    house.script.hooks["decode.token"] = breaks
    event = terminal(await house.stream())
    if kind is ErrorKind.OVERLOADED:  # pushed out of decode: it goes on from where it was
        assert event["choices"][0]["finish_reason"] == "stop"
    else:
        assert event["error"]["code"] == str(kind)


@pytest.mark.parametrize("point", ["prefill.first", "decode.fetch", "decode.token"])
async def test_str_07_a_worker_that_dies_ends_the_stream_once(house: House, point: str) -> None:
    async def dies(call: Call) -> None:
        await call.worker.stop()

    house.script.hooks[point] = dies
    reply = await house.chat(stream=True)
    if reply.status == 200:
        assert terminal(reply.events())["error"]["code"] == "stage_unavailable"
    else:
        assert reply.status == 503


async def test_str_10_an_unknown_finish_reason_is_our_fault(house: House) -> None:
    unknown: Any = 99
    house.script.finish = unknown
    event = terminal(await house.stream())
    assert event["error"]["code"] == "internal_error"
    assert "Traceback" not in event["error"]["message"]


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize(
    ("path", "form"), [("chat/completions", Encoder), ("completions", CompletionEncoder)]
)
async def test_str_10_a_fault_of_our_own_ends_the_stream_with_an_event(
    house: House,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    path: str,
    form: Any,
    at: int,
) -> None:
    made, part = itertools.count(), form.part

    def breaks(encoder: Any, said: Part) -> bytes:
        if next(made) == at:
            raise ZeroDivisionError("secret")
        encoded: bytes = part(encoder, said)
        return encoded

    async def slow(call: Call) -> None:
        await asyncio.sleep(0.01)

    def counted() -> tuple[float, float]:
        errors = metrics.ERRORS.labels("gateway", "internal_error")
        return reading(errors), reading(metrics.REQUESTS.labels("gateway", "failed"))

    monkeypatch.setattr(form, "part", breaks)
    house.script.hooks["decode.token"] = slow
    asked: dict[str, Any] = body() if form is Encoder else {"model": "demo", "prompt": "a"}
    before = counted()
    reply = await post(house.http, f"/v1/{path}", {**asked, "stream": True})
    identity = reply.headers["x-request-id"]
    error = terminal(reply.events())["error"]
    assert error["code"] == "internal_error"
    assert identity in error["message"]
    assert "secret" not in error["message"]
    await house.settled()
    assert counted() == (before[0] + 1, before[1] + 1)
    (record,) = [r for r in caplog.records if r.exc_info and "secret" in str(r.exc_info[1])]
    assert record.getMessage() == "unforeseen"


async def test_str_10_a_fault_of_our_own_in_a_whole_answer_has_a_status(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(encoder: Any, parts: Any) -> bytes:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(Encoder, "whole", breaks)
    reply = await house.chat()
    assert (reply.status, reply.json()["error"]["code"]) == (500, "internal_error")
    assert reply.headers["x-request-id"] in reply.json()["error"]["message"]


async def test_str_08_done_is_last_in_many_streams(empty: House) -> None:
    for stage in Stage:
        await empty.add(stage)
    options = {"include_usage": True}
    many = [empty.stream(stream_options=options) for _ in range(8)]
    for events in await asyncio.gather(*many):
        terminal(events)
        assert events[-2]["usage"]["total_tokens"] > 0


async def test_str_09_a_slow_stream_comes_whole(house: House) -> None:
    """500 tokens over five seconds, through every API: the calls to the stages live as long as
    the answer does, and end with it."""

    texts = dict.fromkeys(["chat/completions", "completions", "responses", "grpc"], "")
    wanted = "".join(ALPHABET[at % 26] for at in range(500))
    near_end = len(wanted) - 20

    async def slow(call: Call) -> None:
        await asyncio.sleep(0.01)
        if call.token == near_end:
            await until(lambda: all(len(text) > near_end - 20 for text in texts.values()))

    async def read(form: str) -> None:
        async for piece in pieces(house, form):
            texts[form] += piece
            # The first token is prefill's, and may be here before decode is asked.
            among = sum(1 < len(text) < near_end - 20 for text in texts.values())
            assert len(decode.calls) >= among, "decode was let go too early"

    script(house, wanted, 0)
    house.script.hooks["decode.token"] = slow
    (decode,) = (fake for fake in house.fakes if fake.stage is Stage.DECODE)
    began = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for form in texts:
            tasks.create_task(read(form))
    assert set(texts.values()) == {wanted}
    assert time.monotonic() - began > 4
    await house.settled()


async def pieces(house: House, form: str) -> AsyncIterator[str]:
    """An answer's text as it comes."""
    if form == "grpc":
        async with AsyncClient(house.grpc) as client:
            async for delta in client.stream([user("a")], max_tokens=600):
                yield delta.text
        return
    asked: dict[str, dict[str, Any]] = {
        "chat/completions": body(max_tokens=600),
        "completions": {"prompt": "a", "max_tokens": 600},
        "responses": {"input": "a", "max_output_tokens": 600},
    }
    raw = json.dumps({"model": "demo", "stream": True, **asked[form]}).encode()
    connection = await Connection.send(house.http, "POST", f"/v1/{form}", raw)
    await connection.head()
    assert connection.status == 200
    read = b""
    async for chunk in connection._chunks():
        *whole, read = (read + chunk).split(b"\n\n")
        for event in whole:
            data = event.rpartition(b"data: ")[2]
            yield "" if data == b"[DONE]" else _text(json.loads(data))


def _text(event: dict[str, Any]) -> str:
    if event.get("type") == "response.output_text.delta":
        return str(event["delta"])
    choices = event.get("choices", ())
    return "".join(c.get("text", c.get("delta", {}).get("content", "")) for c in choices)


async def test_str_08_two_hundred_streams_end_whole(loaded: Loaded) -> None:
    """Scripted stages; 1,000 of them: make bench-gateway."""
    limits = {"max_inflight": 256}
    async with opened(loaded, limits) as house:
        house.script.output = [400 + i % 50 for i in range(40)]
        raw = request(house.http, "demo", 64)
        outcomes = await run(house.http, raw, 200, 1.0)
        assert {(one.status, one.done, one.error) for one in outcomes} == {(200, True, "")}
        assert len(outcomes) == 200
        assert house.gateway.service.budget.used == 0
