"""Cases REQ-*: what clients ask for is honoured, or refused by name."""

from __future__ import annotations

import itertools
import json
import re
import threading
from typing import Any

import grpc
import grpc.aio
import openai
import pytest

from epd.jobs import Stage
from protos.epd.v1 import gateway_pb2, gateway_pb2_grpc
from tests.cases.pictures import body as question
from tests.cases.pictures import file, quad, text
from tests.e2e.cluster import Cluster
from tests.e2e.gateway_house import CHAT, House, raw
from tests.e2e.http_client import Reply, post
from tests.e2e.member import request

PICTURE = file(quad())
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "sure": {"type": "boolean"}},
    "required": ["colour", "sure"],
    "additionalProperties": False,
}


def said(cluster: Cluster, **fields: Any) -> Any:
    reply = cluster.chat(question(PICTURE, text("What is it?"), **fields))
    assert reply.status == 200, reply.body
    return reply.json["choices"][0]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_structured_output_through_all_stages(cluster: Cluster, temperature: float) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    choice = said(cluster, response_format=wanted, temperature=temperature, seed=1, max_tokens=99)
    value = json.loads(choice["message"]["content"])
    assert value["colour"] in ("red", "blue")
    assert isinstance(value["sure"], bool)
    assert choice["finish_reason"] == "stop"


def test_the_first_token_is_constrained_as_well(cluster: Cluster) -> None:
    """max_tokens 1 never reaches decode."""
    choice = said(cluster, guided_regex="[XQZ]{9}", max_tokens=1)
    assert re.fullmatch("[XQZ]+", choice["message"]["content"])
    assert choice["finish_reason"] == "length"


def test_one_of_the_choices(cluster: Cluster) -> None:
    choice = said(cluster, guided_choice=["zebra quux", "yak"], max_tokens=40)
    assert choice["message"]["content"] in ("zebra quux", "yak")
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "(("}, "guided_regex"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "nonsense"}},
                }
            },
            "response_format.json_schema.schema",
        ),
    ],
)
def test_a_bad_grammar_is_400(cluster: Cluster, fields: dict[str, Any], param: str) -> None:
    reply = cluster.chat(question(text("hello"), **fields))
    assert reply.status == 400
    assert reply.error["param"] == param


# --- over scripted stages --------------------------------------------------------------------


def refused(reply: Reply, param: str | None) -> dict[str, Any]:
    assert reply.status == 400, reply.body
    error: dict[str, Any] = reply.json()["error"]
    assert error["param"] == param
    return error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_req_01_max_tokens(house: House, name: str, stream: bool) -> None:
    for wrong in (0, -1, 1.5, "5", 2**31, 2**63, True):
        refused(await house.chat(**{"max_tokens": None, name: wrong, "stream": stream}), name)
    for value in (None, 1, 64):
        fields = {"max_tokens": None, name: value, "stream": stream}
        assert (await house.chat(**fields)).status == 200
    both = {"max_tokens": 5, "max_completion_tokens": 6, "stream": stream}
    refused(await house.chat(**both), "max_tokens")


async def test_req_02_over_length_states_true_numbers(house: House) -> None:
    limit = house.gateway.service.preparer.max_context
    usage = (await house.chat(images=1, max_tokens=1)).json()["usage"]
    used, images = usage["prompt_tokens"], usage["prompt_tokens_details"]["image_tokens"]
    error = refused(await house.chat(images=1, max_tokens=limit - used + 1), "max_tokens")
    assert error["code"] == "context_length_exceeded"
    numbers = [int(number) for number in re.findall(r"\d+", error["message"])]
    assert numbers == [limit, limit + 1, used - images, images, limit - used + 1]
    assert (await house.chat(images=1, max_tokens=limit - used)).status == 200


async def test_req_03_limits_are_the_smallest_workers(empty: House) -> None:
    for large, capacity in enumerate(
        ({"max_context": 60, "max_rows": 3}, {"max_context": 600, "max_rows": 30})
    ):
        empty.capacity = capacity
        for stage in Stage:
            await empty.add(stage, f"{stage}-{large}")
    refused(await empty.chat(max_tokens=60), "max_tokens")
    error = refused(await empty.chat(images=1, max_tokens=1), "messages")
    assert "at most 3" in error["message"]
    assert empty.journal == [], "nothing reached a worker"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"191222": -100}}, "logit_bias.191222"),
        ({"logit_bias": {"-1": 5}}, "logit_bias.-1"),
        ({"logit_bias": {"abc": 1}}, "logit_bias.abc"),
        ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias.05"),
        ({"logit_bias": {"0": 101}}, "logit_bias.0"),
        ({"stop_token_ids": [10**9]}, "stop_token_ids[0]"),
        ({"bad_words": ["x"]}, "bad_words"),
    ],
)
async def test_req_04_ids_outside_the_vocabulary(
    house: House, fields: dict[str, Any], param: str
) -> None:
    refused(await house.chat(**fields), param)
    assert house.journal == []


ODD = ["NaN", "Infinity", "-Infinity", "1e999"]
NUMBERS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"]


def asked_with(option: str, value: str) -> gateway_pb2.ChatRequest:
    """A question over gRPC, with one option set to this number."""
    parts = [gateway_pb2.ContentPart(text="what?")]
    user = gateway_pb2.Message(role=gateway_pb2.ROLE_USER, parts=parts)
    request = gateway_pb2.ChatRequest(messages=[user])
    setattr(request.options, option, float(value))
    return request


@pytest.mark.parametrize("name", [*NUMBERS, "repetition_penalty"])
@pytest.mark.parametrize("value", ODD)
async def test_req_05_numbers_that_are_none(house: House, name: str, value: str) -> None:
    body = raw().removesuffix(b"}") + f', "{name}": {value}}}'.encode()
    assert (await post(house.http, CHAT, body)).status == 400
    request = asked_with(name, value)
    async with grpc.aio.insecure_channel(house.grpc) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(gateway_pb2_grpc.GatewayStub(channel).Chat(request)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


class Beside(threading.Thread):
    """A stream of real stages that runs while other things are asked; `text` at its end."""

    def __init__(self, cluster: Cluster, **fields: Any) -> None:
        super().__init__()
        self.text, self.error, self.started = "", "", threading.Event()
        self._client = openai.OpenAI(base_url=cluster.base_url, api_key="x", max_retries=0)
        self._asked = {
            "model": cluster.model,
            "messages": question(PICTURE, text("What is it?"))["messages"],
            "stream": True,
            "max_tokens": 1500,
            "extra_body": {"ignore_eos": True},
            **fields,
        }

    def run(self) -> None:
        try:
            create: Any = self._client.chat.completions.create
            for chunk in create(**self._asked):
                self.started.set()
                self.text += "".join(choice.delta.content or "" for choice in chunk.choices)
        except openai.OpenAIError as error:
            self.error = repr(error)
        finally:
            self.started.set()
            self._client.close()

    def __enter__(self) -> Beside:
        self.start()
        assert self.started.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self.join()
        assert self.error == ""


def test_req_05_a_stream_beside_them_is_not_disturbed(cluster: Cluster) -> None:
    """Real stages, over both APIs: one that a number reached would take the stream along."""
    drawn = {"temperature": 1.3, "seed": 5}
    with Beside(cluster, **drawn) as alone:
        pass
    stub = gateway_pb2_grpc.GatewayStub
    with Beside(cluster, **drawn) as beside, grpc.insecure_channel(cluster.grpc_address) as channel:
        during = 0
        for name, value in itertools.product([*NUMBERS, "repetition_penalty"], ODD):
            asked = json.dumps({"model": cluster.model, **question(text("a"))}).encode()
            data = asked.removesuffix(b"}") + f', "{name}": {value}}}'.encode()
            reply = request(cluster.address, CHAT, raw=data)
            assert reply.status == 400, (name, value, reply.body)
            with pytest.raises(grpc.RpcError) as caught:
                list(stub(channel).Chat(asked_with(name, value)))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            during += beside.is_alive()
    assert during > 3, "the stream was over before the others came"
    assert len(alone.text) > 100
    assert beside.text == alone.text


OPTIONAL = [
    *NUMBERS, "repetition_penalty", "n", "seed", "stop", "logprobs", "top_logprobs", "logit_bias",
    "max_completion_tokens", "min_tokens", "top_k", "ignore_eos", "stop_token_ids", "stream",
    "stream_options", "response_format", "guided_json", "guided_regex", "guided_choice", "tools",
    "tool_choice", "parallel_tool_calls", "user", "metadata", "store", "timeline",
]  # fmt: skip


async def test_req_08_null_is_absent(house: House) -> None:
    plain = (await house.chat()).json()["choices"]
    for names in [*([name] for name in OPTIONAL), OPTIONAL]:
        reply = await house.chat(**dict.fromkeys(names))
        assert reply.status == 200, (names, reply.body)
        assert reply.json()["choices"] == plain
    scored = (await house.chat(logprobs=True, top_logprobs=None)).json()["choices"][0]
    assert scored["logprobs"]["content"]


async def test_metadata_and_user_change_nothing(house: House) -> None:
    plain = (await house.chat()).json()["choices"]
    named = {"metadata": {"team": "a", "run": "7"}, "user": "someone", "safety_identifier": "x"}
    named["prompt_cache_key"] = "conversation 5"
    reply = await house.chat(**named)
    assert reply.status == 200, reply.body
    assert reply.json()["choices"] == plain
    events = await house.stream(**named)
    streamed = [event["choices"][0]["delta"].get("content", "") for event in events[:-1]]
    assert "".join(streamed) == plain[0]["message"]["content"]


async def test_req_10_a_plain_body_of_curl(house: House) -> None:
    body = b'{"model":"demo","messages":[{"role":"user","content":"Hello!"}]}'
    for kind in ("application/json", "application/x-www-form-urlencoded"):
        assert (await post(house.http, CHAT, body, content_type=kind)).status == 200


# --- numbers of real stages -------------------------------------------------------------------


def test_req_06_tiny_temperatures_are_greedy(cluster: Cluster) -> None:
    """Below 1e-5 by rule; 1e-4 is drawn, and what is drawn there is the greedy choice."""

    def scored(temperature: float) -> tuple[str, list[float]]:
        asked = {"temperature": temperature, "max_tokens": 8, "ignore_eos": True, "logprobs": True}
        choice = said(cluster, **asked, top_logprobs=2)
        entries = choice["logprobs"]["content"]
        assert len(entries) == 8
        tops = [top["logprob"] for entry in entries for top in entry["top_logprobs"]]
        return choice["message"]["content"], [*(entry["logprob"] for entry in entries), *tops]

    greedy, logprobs = scored(0)
    assert greedy
    assert all(-9999 < logprob <= 0 for logprob in logprobs)
    for temperature in (1e-4, 2e-5, 1e-5, 9e-6, 1e-7, 5e-324, -0.0):
        content, found = scored(temperature)
        assert content == greedy, temperature
        assert found == pytest.approx(logprobs, abs=1e-3), temperature


def test_req_07_stop_forms_and_a_seed_of_ones_own(cluster: Cluster) -> None:
    """While two streams without a seed run, which a generator of all requests would show."""
    drawn = {"temperature": 2.0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
    plain = {"temperature": 2.0, "max_tokens": 12, "ignore_eos": True}

    def content(**fields: Any) -> str:
        text: str = said(cluster, **plain, **fields)["message"]["content"]
        return text

    long = drawn | {"max_tokens": 400}
    with Beside(cluster, **long) as one, Beside(cluster, **long) as two:
        seeded = content(seed=42)
        assert content(seed=42) == seeded
        other = content(seed=43)
        assert other != seeded
        with Beside(cluster, **drawn, seed=42) as streamed:
            pass
    assert streamed.text == seeded, "streamed or not, beside others or not"
    assert one.text != two.text
    for unseeded in (one.text, two.text):
        assert not unseeded.startswith((seeded, other))
    assert content() != content()
    stop = seeded[3:6]
    assert content(seed=42, stop=stop) == content(seed=42, stop=[stop]) == seeded[:3]


@pytest.mark.parametrize("stop", ["five", ["five"]])
async def test_req_07_stop_as_a_text_and_as_a_list(house: House, stop: Any) -> None:
    tokenizer = house.gateway.service.tokenizer
    house.script.output = tokenizer.encode("four five six", add_special_tokens=False).ids
    choice = (await house.chat(stop=stop)).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("four ", "stop")
