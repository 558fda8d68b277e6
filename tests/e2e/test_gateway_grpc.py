"""The gRPC API says and does what the HTTP API does: every field has its twin."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import logging
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2

from epd.client import AsyncClient, Client, assistant, image_url, user
from epd.errors import EpdError, ErrorKind
from epd.jobs import Stage
from epd.obs import metrics
from gateway.grpc_api import GatewayService
from gateway.openapi import DOCUMENT
from protos.epd.v1 import gateway_pb2 as pb
from protos.epd.v1 import gateway_pb2_grpc
from tests.e2e.fake_stages import fail
from tests.e2e.gateway_house import House, body, picture
from tests.e2e.http_client import post
from tests.readings import reading

ROOT = Path(__file__).parents[2]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

# Fields of a chat over HTTP -> what says the same over gRPC: an example, or why there is none.
TWINS: dict[str, tuple[Any, dict[str, Any]] | str] = {
    "temperature": (0.5, {"temperature": 0.5}),
    "top_p": (0.9, {"top_p": 0.9}),
    "top_k": (7, {"top_k": 7}),
    "min_p": (0.1, {"min_p": 0.1}),
    "repetition_penalty": (1.5, {"repetition_penalty": 1.5}),
    "presence_penalty": (-0.5, {"presence_penalty": -0.5}),
    "frequency_penalty": (0.25, {"frequency_penalty": 0.25}),
    "seed": (-1, {"seed": 2**64 - 1}),
    "max_tokens": (9, {"max_tokens": 9}),
    "max_completion_tokens": (9, {"max_tokens": 9}),
    "min_tokens": (3, {"min_tokens": 3}),
    "logit_bias": ({"5": -3.5}, {"logit_bias": {5: -3.5}}),
    "stop": ("xyz", {"stop": ["xyz"]}),
    "stop_token_ids": ([5, 6], {"stop_token_ids": [5, 6]}),
    "ignore_eos": (True, {"ignore_eos": True}),
    "logprobs": (True, {"logprobs": True}),
    "n": (3, {"n": 3}),
    "response_format": ({"type": "json_object"}, {"json_object": True}),
    "guided_json": (SCHEMA, {"guided_json": json.dumps(SCHEMA)}),
    "guided_regex": ("[a-z]+", {"guided_regex": "[a-z]+"}),
    "guided_choice": (["a", "b"], {"guided_choice": ["a", "b"]}),
    "model": "ChatRequest.model",
    "messages": "ChatRequest.messages; test_messages_are_the_same",
    "top_logprobs": "test_logprobs_have_the_same_bytes",
    "tools": "ChatRequest.tools; test_gateway_grpc_tools.py",
    "tool_choice": "ChatRequest.tool_choice; test_gateway_grpc_tools.py",
    "parallel_tool_calls": "ChatRequest.parallel_tool_calls; test_gateway_grpc_tools.py",
    "stream": "always streamed",
    "stream_options": "usage always comes, at the end",
    "timeline": "always comes, at the end",
    "user": "changes nothing; client_request_id is logged",
    "safety_identifier": "changes nothing",
    "prompt_cache_key": "changes nothing; the router goes by prompts' beginnings",
    "metadata": "changes nothing; a call has metadata of its own",
}


def jobs(house: House) -> list[Any]:
    """What the stages got for the last request, without what differs each time."""
    prefill = house.script.jobs_of(Stage.PREFILL)[-1]
    decode = house.script.jobs_of(Stage.DECODE)[-1]
    for job in (prefill, decode):
        job.request_id, job.nonce = "", 0
        if not job.sampling.seed or job.sampling.seed < 2**63:
            job.sampling.seed = 0  # drawn
    decode.arrival_ms = 0
    decode.sampling.choice = 0  # of several jobs, whichever came last
    return [prefill, decode]


@pytest.fixture
async def client(house: House) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(house.grpc) as client:
        yield client


def test_no_field_is_forgotten() -> None:
    fields = DOCUMENT["components"]["schemas"]["ChatRequest"]["properties"]
    assert set(TWINS) == set(fields)


@pytest.mark.parametrize(
    "field", [name for name, twin in TWINS.items() if not isinstance(twin, str)]
)
async def test_options_are_the_same(house: House, client: AsyncClient, field: str) -> None:
    twin = TWINS[field]
    assert not isinstance(twin, str)
    value, options = twin
    asked = {**body(), field: value}
    if field == "max_completion_tokens":
        del asked["max_tokens"]
    assert (await post(house.http, "/v1/chat/completions", asked)).status == 200
    over_http = jobs(house)
    await client.chat([user("what is it?")], **{"max_tokens": 64, **options})
    assert jobs(house) == over_http
    await house.settled()


async def test_messages_are_the_same(house: House, client: AsyncClient) -> None:
    url = picture("blue")["image_url"]["url"]
    low = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
    content = [picture("red"), {"type": "text", "text": "a <|image_pad|>"}, low]
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": content},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "and?"},
    ]
    assert (await house.chat(messages=messages)).status == 200
    over_http = jobs(house)
    file = base64.b64decode(picture("red")["image_url"]["url"].partition(",")[2])
    said = user(file, "a <|image_pad|>")
    said.parts.append(image_url(url, low_detail=True))
    system = pb.Message(role=pb.ROLE_SYSTEM, parts=[pb.ContentPart(text="s")])
    await client.chat([system, said, assistant("yes"), user("and?")], max_tokens=64)
    assert jobs(house) == over_http


@pytest.mark.parametrize("url", ["http://127.0.0.1/a.png", "file:///etc/passwd", "data:;base64,!"])
async def test_image_urls_are_judged_alike(house: House, client: AsyncClient, url: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    error = (await house.chat(messages=[{"role": "user", "content": [part]}])).json()["error"]
    with pytest.raises(EpdError) as caught:
        await client.chat([pb.Message(role=pb.ROLE_USER, parts=[image_url(url)])])
    assert caught.value.param == "messages[0].parts[0].image_url"
    assert (str(caught.value.kind), caught.value.message) == (error["code"], error["message"])


async def test_logprobs_have_the_same_bytes(house: House, client: AsyncClient) -> None:
    house.script.alternatives = 3
    whole = (await house.chat(logprobs=True, top_logprobs=3)).json()["choices"][0]["logprobs"]
    over_http = [
        (bytes(entry["bytes"]), tuple(bytes(top["bytes"]) for top in entry["top_logprobs"]))
        for entry in whole["content"]
    ]
    deltas = client.stream([user("what is it?")], logprobs=True, top_logprobs=3)
    found = [(text.raw, text.top) async for delta in deltas for text in delta.texts]
    assert found == over_http
    assert not [delta.texts async for delta in client.stream([user("what is it?")]) if delta.texts]


# --- other calls -------------------------------------------------------------------------


async def test_completions_are_the_same(house: House, client: AsyncClient) -> None:
    for prompt in ("abc <|im_end|> d", [400, 401, 402]):
        asked = {"model": "demo", "prompt": prompt, "temperature": 0, "seed": 2**63}
        whole = (await post(house.http, "/v1/completions", asked)).json()
        over_http = jobs(house)
        answer = await client.complete(prompt, temperature=0, seed=2**63)
        assert jobs(house) == over_http
        assert answer.text == whole["choices"][0]["text"]
    for request, param in (
        (pb.CompletionRequest(), "text"),
        (pb.CompletionRequest(text=""), "text"),
        (pb.CompletionRequest(ids=pb.TokenIds()), "ids.ids"),
        (pb.CompletionRequest(ids=pb.TokenIds(ids=[4, 10**6])), "ids.ids[1]"),
    ):
        assert await bad_field(house, request) == param


async def test_tokenize_and_back_are_the_same(house: House, client: AsyncClient) -> None:
    over_http = (await post(house.http, "/tokenize", {"prompt": "a <|im_end|>"})).json()
    assert await client.tokenize("a <|im_end|>") == over_http["tokens"]
    said = body(images=1)["messages"]
    over_http = (await post(house.http, "/tokenize", {"messages": said})).json()
    file = base64.b64decode(picture("red")["image_url"]["url"].partition(",")[2])
    ids = await client.tokenize([user(file, "what is it?")])
    assert ids == over_http["tokens"]
    text = (await post(house.http, "/detokenize", {"tokens": ids})).json()["prompt"]
    assert await client.detokenize(ids) == text
    for request, param in (
        (pb.DetokenizeRequest(ids=[5] * 200_000), "ids"),
        (pb.TokenizeRequest(), "messages"),
        (pb.TokenizeRequest(text="a", messages=[user("a")]), "text"),
        (pb.TokenizeRequest(text="a", model="other"), "model"),
        (pb.DetokenizeRequest(), "ids"),
        (pb.DetokenizeRequest(ids=[10**6]), "ids[0]"),
    ):
        assert await bad_field(house, request) == param
    assert house.journal == []


# --- faults ------------------------------------------------------------------------------

METHODS = {
    pb.ChatRequest: "Chat",
    pb.CompletionRequest: "Complete",
    pb.TokenizeRequest: "Tokenize",
    pb.DetokenizeRequest: "Detokenize",
}


async def refused(house: House, request: Any) -> grpc.aio.AioRpcError:
    async with grpc.aio.insecure_channel(house.grpc) as channel:
        call = getattr(gateway_pb2_grpc.GatewayStub(channel), METHODS[type(request)])(request)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (_last(call) if hasattr(call, "__aiter__") else call)
    return caught.value


async def _last(call: Any) -> Any:
    return [event async for event in call][-1]


def details(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    """google.rpc details by the names of their types."""
    raw = dict(error.trailing_metadata() or ())["grpc-status-details-bin"]
    status = status_pb2.Status.FromString(raw)
    assert (status.code, status.message) == (error.code().value[0], error.details())
    found: dict[str, Any] = {}
    for detail in status.details:
        message = getattr(error_details_pb2, detail.TypeName().rpartition(".")[2])()
        assert detail.Unpack(message)
        found[type(message).__name__] = message
    return found


async def bad_field(house: House, request: Any) -> str:
    error = await refused(house, request)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    found = details(error)
    (violation,) = found["BadRequest"].field_violations
    assert violation.description == error.details()
    assert found["ErrorInfo"].metadata["param"] == violation.field
    return str(violation.field)


async def test_faults_have_googles_details(house: House) -> None:
    asked = pb.ChatRequest(messages=[user("a")])
    house.script.hooks["prefill.job"] = fail(ErrorKind.OVERLOADED)
    error = await refused(house, asked)
    found = details(error)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert found["ErrorInfo"].reason == "overloaded"
    assert found["ErrorInfo"].domain == "epd"
    assert found["RetryInfo"].retry_delay.seconds == 1
    assert "BadRequest" not in found
    house.script.hooks["prefill.job"] = fail(ErrorKind.CONTEXT_LENGTH_EXCEEDED)
    # The client's own fault, and no field of its: to ask again would change nothing.
    assert set(details(await refused(house, asked))) == {"ErrorInfo"}


async def test_the_request_id_comes_first_and_the_clients_is_logged(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    said = "mine\n\x00é" + "x" * 300
    request = pb.ChatRequest(messages=[user("a")], client_request_id=said)
    async with grpc.aio.insecure_channel(house.grpc) as channel:
        stub = gateway_pb2_grpc.GatewayStub(channel)
        with caplog.at_level(logging.INFO):
            call = stub.Chat(request)
            first = dict(await call.initial_metadata() or ())
            events = [event async for event in call]
        assert events[0].accepted.request_id == first["x-request-id"]
        assert first["x-client-request-id"] == "mine" + "x" * 121
        bad = stub.Chat(pb.ChatRequest())
        with pytest.raises(grpc.aio.AioRpcError):
            await _last(bad)
        first = dict(await bad.initial_metadata() or ())
        assert str(first["x-request-id"]).startswith("chatcmpl-")
        assert "x-client-request-id" not in first
    assert f"client calls this request mine{'x' * 121}" in caplog.text


async def test_a_fault_of_ours_in_the_stream_names_the_request(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, delta = itertools.count(), GatewayService._delta

    def breaks(*of: Any) -> pb.ChatEvent:
        if next(made) == 2:
            raise ZeroDivisionError("secret")
        return delta(*of)

    async def slow(call: Any) -> None:
        await asyncio.sleep(0.01)

    monkeypatch.setattr(GatewayService, "_delta", breaks)
    house.script.hooks["decode.token"] = slow
    before = reading(metrics.REQUESTS.labels("gateway", "failed"))
    async with grpc.aio.insecure_channel(house.grpc) as channel:
        stub = gateway_pb2_grpc.GatewayStub(channel)
        call = stub.Chat(pb.ChatRequest(messages=[user("a")]))
        identity = dict(await call.initial_metadata() or ())["x-request-id"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _last(call)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert str(identity) in (caught.value.details() or "")
    assert "secret" not in (caught.value.details() or "")
    await house.settled()
    assert reading(metrics.REQUESTS.labels("gateway", "failed")) == before + 1


# --- the documented examples ---------------------------------------------------------------


def examples(language: str) -> list[str]:
    text = (ROOT / "docs" / "api.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("number", range(len(examples("python"))))
async def test_examples_of_the_docs_run(house: House, number: int, tmp_path: Path) -> None:
    code = examples("python")[number].replace("127.0.0.1:8001", house.grpc)
    script = tmp_path / "example.py"
    script.write_text(code)
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), cwd=ROOT, env={"PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, errors = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0, errors.decode()
    said = house.gateway.service.tokenizer.decode(house.script.output)
    assert said.split()[0] in output.decode()


async def test_the_blocking_client_is_the_same(house: House) -> None:
    def talk() -> tuple[Any, ...]:
        with Client(house.grpc) as client:
            ids = client.tokenize("hello")
            found = (client.detokenize(ids), client.complete(ids).text, client.models()[0].id)
            stream = client.stream([user("a")], n=2, logprobs=True)
            return (*found, {delta.choice for delta in stream})

    assert await asyncio.to_thread(talk) == (
        "hello",
        house.gateway.service.tokenizer.decode(house.script.output),
        "demo",
        {0, 1},
    )
