"""Routes beside chat: completions, tokenize, detokenize, version, the OpenAPI document."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

import epd
from epd.jobs import Stage
from protos.epd.v1 import common_pb2
from tests.e2e.gateway_house import House, body
from tests.e2e.http_client import Reply, get, post


def refused(reply: Reply) -> Any:
    assert reply.status == 400, reply.body
    return reply.json()["error"]["param"]


async def complete(house: House, **fields: Any) -> Reply:
    return await post(house.http, "/v1/completions", {"model": "demo", "prompt": "a b", **fields})


async def test_openais_client_completes(house: House) -> None:
    client = openai.AsyncOpenAI(base_url=f"http://{house.http}/v1", api_key="x", max_retries=0)
    ask: dict[str, Any] = {"model": "demo", "prompt": "red square", "logprobs": 2, "n": 2}
    async with client:
        whole = await client.completions.create(**ask)
        chunks = [
            chunk
            async for chunk in await client.completions.create(
                **ask, stream=True, stream_options={"include_usage": True}
            )
        ]
    assert [choice.index for choice in whole.choices] == [0, 1]
    for choice in whole.choices:
        parts = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert parts[-1].finish_reason == choice.finish_reason == "stop"
        assert choice.logprobs is not None
        offsets = choice.logprobs.text_offset or []
        streamed = [at for part in parts if part.logprobs for at in part.logprobs.text_offset or ()]
        assert streamed == offsets
        assert offsets == sorted(offsets)
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 2 * len(house.script.output)


@pytest.mark.parametrize("tokens_per_message", [1, 3])
async def test_offsets_count_characters_of_the_text(house: House, tokens_per_message: int) -> None:
    tokenizer = house.gateway.service.tokenizer
    ids = tokenizer.encode("\u00e9 \u2713\U0001f642 red", add_special_tokens=False).ids
    assert len(ids) > 6, "characters of several tokens"
    house.script.output, house.script.tokens_per_message = ids, tokens_per_message
    house.script.finish = common_pb2.FINISH_REASON_LENGTH
    choice = (await complete(house, logprobs=0)).json()["choices"][0]
    text, found = choice["text"], choice["logprobs"]
    assert text == tokenizer.decode(ids)
    assert found["text_offset"] == sorted(found["text_offset"])
    for token, at in zip(found["tokens"], found["text_offset"], strict=True):
        assert "\ufffd" in token or text[at : at + len(token)] == token


async def test_a_completions_prompt_is_what_was_sent(house: House) -> None:
    tokenizer = house.gateway.service.tokenizer
    for prompt in ("red <|im_end|> square", [5, 6, 7], [[5, 6]], ["x"]):
        assert (await complete(house, prompt=prompt)).status == 200
        ids = list(house.script.jobs_of(Stage.PREFILL)[-1].token_ids)
        flat = (
            prompt[0] if isinstance(prompt, list) and isinstance(prompt[0], list | str) else prompt
        )
        if isinstance(flat, str):
            assert tokenizer.decode(ids, skip_special_tokens=False) == flat
            assert tokenizer.token_to_id("<|im_end|>") not in ids, "a text is a text"
        else:
            assert ids == flat
    assert house.script.jobs_of(Stage.PREFILL)[-1].sampling.max_tokens == 16


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [10**6]}, "prompt[0]"),
        ({"prompt": [1022]}, "prompt"),
        ({"prompt": "a" * 100_000}, "prompt"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
async def test_what_completions_refuse(house: House, fields: dict[str, Any], param: str) -> None:
    assert refused(await complete(house, **fields)) == param
    assert house.journal == []


async def test_tokenize_and_back(house: House) -> None:
    reply = await post(house.http, "/tokenize", {"prompt": "red <|im_end|>"})
    tokens = reply.json()["tokens"]
    assert reply.json()["count"] == len(tokens)
    back = await post(house.http, "/detokenize", {"tokens": tokens})
    assert back.json() == {"prompt": "red <|im_end|>"}
    messages = [{"role": "user", "content": "hi"}]
    shown = await post(house.http, "/tokenize", {"messages": messages})
    await house.chat(messages=messages)
    assert shown.json()["tokens"] == list(house.script.jobs_of(Stage.PREFILL)[-1].token_ids)
    assert len(house.script.jobs) == 2, "only the chat reached the stages"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "x": 1}, "x"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [10**9]}, "tokens[0]"),
        ("/detokenize", {"tokens": [5] * 200_000}, "tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", [], None),
    ],
)
async def test_bad_tokens_are_named(house: House, path: str, body: Any, param: str) -> None:
    assert refused(await post(house.http, path, body)) == param


async def test_version(house: House) -> None:
    assert (await get(house.http, "/version")).json() == {"version": epd.__version__}


async def test_the_document_names_every_route(house: House) -> None:
    document = (await get(house.http, "/openapi.json")).json()
    inner = {"/metrics", "/debug/state", "/openapi.json"}
    served = {
        getattr(route, "path", "").replace("{name:path}", "{name}")
        for route in house.gateway.app.routes
    }
    assert set(document["paths"]) == served - inner
    text = json.dumps(document)
    for name in document["components"]["schemas"]:
        assert f"#/components/schemas/{name}" in text, f"{name} is not used"


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
async def test_the_clients_own_id_comes_back_beside_ours(house: House, path: str) -> None:
    asked: dict[str, dict[str, Any]] = {
        "chat/completions": body(),
        "completions": {"prompt": "a"},
        "responses": {"input": "a"},
    }
    said = "my \x80\xa0id" + "x" * 300
    for more, status in (({}, 200), ({"stream": True}, 200), ({"temperature": 9}, 400)):
        ask = {"model": "demo", **asked[path], **more}
        reply = await post(house.http, f"/v1/{path}", ask, x_request_id=said)
        assert reply.status == status
        shown = reply.headers["x-client-request-id"]
        assert shown.startswith("my id")
        assert said.replace("\x80\xa0", "").startswith(shown)
        assert 100 < len(shown) <= 128
        assert reply.headers["x-request-id"] not in (said, shown)
    without = await post(house.http, f"/v1/{path}", {"model": "demo", **asked[path]})
    assert "x-client-request-id" not in without.headers
