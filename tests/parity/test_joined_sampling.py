"""Split == joined, for everything that decides which token comes and when the answer ends.

The same requests go through four real processes, all at once, and one by one through the
whole engine in this process (`tests.joined`): tokens, logprobs, alternatives, texts, finish
reasons and counts are equal bit by bit. Exact mode, so batches and chunks don't matter.
"""

from __future__ import annotations

import asyncio
import json
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from PIL import Image

from epd.client import Answer, user
from epd.client.answers import Gathered
from epd.client.messages import chat_request
from protos.epd.v1 import gateway_pb2 as pb
from protos.epd.v1 import gateway_pb2_grpc
from tests.e2e.cluster import DEMO_CHECKPOINT, Cluster
from tests.joined import Joined, Output
from tests.parity.service import png

pytestmark = pytest.mark.timeout(600)
DTYPE = "float32"
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}, "count": {"type": "integer"}},
        "required": ["colour", "count"],
    }
)
LOGPROBS = {"logprobs": True, "top_logprobs": 5}
LONG = {"ignore_eos": True, "max_tokens": 24}

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "greedy long": {"temperature": 0, **LONG, **LOGPROBS},
    "sampled": {"temperature": 1.0},
    "sampled long": {"temperature": 1.0, **LONG, **LOGPROBS},
    "hot": {"temperature": 2.0, **LONG, **LOGPROBS},
    "cold": {"temperature": 0.01, **LONG},
    "another seed": {"temperature": 1.0, "seed": 2**64 - 1, **LONG, **LOGPROBS},
    "top k": {"temperature": 1.5, "top_k": 3, **LONG, **LOGPROBS},
    "top p": {"temperature": 1.5, "top_p": 0.6, **LONG, **LOGPROBS},
    "min p": {"temperature": 1.5, "min_p": 0.2, **LONG, **LOGPROBS},
    "all filters": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02, **LONG},
    "repetition": {"temperature": 0, "repetition_penalty": 1.4, **LONG, **LOGPROBS},
    "presence": {"temperature": 0, "presence_penalty": 1.5, **LONG, **LOGPROBS},
    "frequency": {"temperature": 0, "frequency_penalty": 1.1, **LONG, **LOGPROBS},
    "rewards": {"temperature": 0, "frequency_penalty": -2.0, "presence_penalty": -1.0, **LONG},
    "all penalties": {
        "temperature": 0.9,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        **LONG,
        **LOGPROBS,
    },
    "bias": {"temperature": 1.0, "logit_bias": {400: 20.0, 401: 19.0, 402: -100.0}, **LONG},
    "min tokens": {"temperature": 1.0, "min_tokens": 10, "max_tokens": 20, **LOGPROBS},
    "min is max": {"temperature": 1.0, "min_tokens": 9, "max_tokens": 9},
    "stop ids": {"temperature": 1.0, "stop_token_ids": list(range(0, 1000, 5)), **LONG},
    "stop ids late": {
        "temperature": 1.0,
        "stop_token_ids": list(range(0, 1000, 5)),
        "min_tokens": 8,
        **LONG,
        **LOGPROBS,
    },
    "stop string": {"temperature": 1.0, "stop": ["e"], **LONG, **LOGPROBS},
    "stop strings": {"temperature": 1.2, "stop": ["er", "zz", " the"], **LONG},
    "one token": {"temperature": 1.0, "max_tokens": 1, **LOGPROBS},
    "two tokens": {"temperature": 1.0, "max_tokens": 2, **LOGPROBS},
    "several": {"temperature": 1.0, "n": 3, **LONG, **LOGPROBS},
    "several greedy": {"temperature": 0, "n": 2, "max_tokens": 8},
    "several stop": {"temperature": 1.4, "n": 3, "stop": ["a", "o"], **LONG},
    "several of one token": {"temperature": 1.0, "n": 4, "max_tokens": 1, **LOGPROBS},
    "regex": {"temperature": 1.0, "guided_regex": "[a-z]{3,9} [0-9]{2}", "max_tokens": 20},
    "choice": {"temperature": 1.0, "guided_choice": ["red", "reddish", "blue"], **LOGPROBS},
    "schema": {"temperature": 1.0, "guided_json": SCHEMA, "max_tokens": 30, **LOGPROBS},
    "json cut": {"temperature": 1.0, "json_object": True, "max_tokens": 7},
    "grammar and penalties": {
        "temperature": 0.8,
        "guided_regex": "(ab|cd|ef){4,9}",
        "frequency_penalty": 1.0,
        "repetition_penalty": 1.1,
        "max_tokens": 30,
        **LOGPROBS,
    },
    "grammar and several": {"temperature": 1.5, "n": 3, "guided_regex": "[a-f]+", **LONG},
}


def _drawn(number: int) -> dict[str, Any]:
    """Parameters that nobody chose, the same in every run."""
    dice = random.Random(number)
    options: dict[str, Any] = {"temperature": dice.choice([0, 0.5, 1.0, 1.7]), **LONG}
    choices: dict[str, list[Any]] = {
        "top_k": [0, 2, 50],
        "top_p": [1.0, 0.5],
        "min_p": [0.0, 0.1],
        "repetition_penalty": [1.0, 0.8, 1.6],
        "presence_penalty": [0.0, 2.0, -1.0],
        "frequency_penalty": [0.0, 0.7],
        "n": [1, 2],
        "stop": [[], ["in", "x"]],
        "min_tokens": [0, 6],
    }
    options |= {name: dice.choice(values) for name, values in choices.items()}
    return options | {"seed": dice.getrandbits(64)} | dice.choice([{}, LOGPROBS])


CASES |= {f"drawn {number}": _drawn(number) for number in range(12)}


def _request(number: int, options: dict[str, Any]) -> tuple[pb.ChatRequest, list[Image.Image]]:
    """Every other one has a picture; that is what the model was trained on."""
    options = {"max_tokens": 16, "seed": 1000 + number, **options}
    if number % 2:
        said, images = user("What colours are there, and how many things?"), []
    else:
        image = Image.new("RGB", (64, 48), ("red", "green", "blue")[number % 3])
        said, images = user(png(image), "What colour is it?"), [image]
    return chat_request([said], "", (), "", None, options), images


REQUESTS = {name: _request(number, options) for number, (name, options) in enumerate(CASES.items())}


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Answer]]:
    """What the service says to all of them at once."""
    settings = {"model.exact": True, "model.dtype": DTYPE, "prefill.chunk_tokens": 16}
    cluster = Cluster(tmp_path_factory.mktemp("joined"), DEMO_CHECKPOINT, settings=settings)
    try:
        cluster.start()
        yield asyncio.run(_ask_all(cluster.grpc_address))
        cluster.assert_clean()
    finally:
        cluster.close()


async def _ask_all(address: str) -> dict[str, Answer]:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = gateway_pb2_grpc.GatewayStub(channel)

        async def ask(request: pb.ChatRequest) -> Answer:
            gathered = Gathered({"n": request.options.n})
            async for event in stub.Chat(request, timeout=300):
                gathered.add(event)
            return gathered.answer

        answers = await asyncio.gather(*(ask(request) for request, _ in REQUESTS.values()))
    return dict(zip(REQUESTS, answers, strict=True))


@pytest.fixture(scope="module")
def joined() -> Joined:
    return Joined(Path(DEMO_CHECKPOINT), dtype=DTYPE, exact=True)


def _single(value: float | None) -> float | None:
    """As the wire has it: a float of 32 bits."""
    return None if value is None else struct.unpack("f", struct.pack("f", value))[0]


@pytest.mark.parametrize("name", CASES)
def test_split_is_joined(name: str, split: dict[str, Answer], joined: Joined) -> None:
    request, images = REQUESTS[name]
    answer, expected = split[name], joined.answer(request, images)
    assert answer.texts == [output.text for output in expected]
    assert answer.reasons == [output.reason for output in expected]
    assert answer.usage.completion_tokens == sum(output.sampled for output in expected)
    for tokens, output in zip(answer.tokens, expected, strict=True):
        found = [(token.id, token.logprob, token.top) for token in tokens]
        assert found == [
            (
                sampled.token.id,
                _single(sampled.token.logprob),
                tuple((index, _single(logprob)) for index, logprob in sampled.token.top),
            )
            for sampled in output.tokens
        ]
    _says_something(name, expected)


def _says_something(name: str, outputs: list[Output]) -> None:
    """The cases mean what their names say: none is trivially equal."""
    if name in ("several", "grammar and several"):
        assert len({output.text for output in outputs}) > 1
    if "long" in name:
        assert all(output.sampled == 24 for output in outputs)
    if name.startswith("stop string"):
        assert outputs[0].reason == "stop"
        assert outputs[0].sampled < 24
