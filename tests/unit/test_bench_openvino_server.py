"""`bench.peers.openvino_server`: its HTTP, with a scripted engine in place of OpenVINO."""

from __future__ import annotations

import asyncio
import random
import threading
import urllib.request
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
from tokenizers import Tokenizer, decoders, models

from bench.peers.openvino_engine import Asked, Came
from bench.peers.openvino_server import Handler
from epd.bench.campaign import connect
from epd.bench.client import open_session, send
from epd.bench.content import Words, body
from epd.bench.load import Target
from epd.bench.record import Record
from epd.bench.workload import Picture, Shape

PICTURE = Picture(30, 20, 1)


FOREVER, TOO_MANY = 1000, 1001


class ScriptedEngine:
    """A token a step; a prompt token a word, 100 a picture."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[Asked] = []
        self.cancelled = threading.Event()

    def answer(self, asked: Asked) -> Iterator[Came]:
        self.asked.append(asked)
        if asked.tokens == TOO_MANY:
            yield Came(asked.number, error="too long")
            return
        left = asked.tokens
        try:
            while left > 1 or asked.tokens == FOREVER:
                yield Came(asked.number, [1], [-0.5])
                left -= 1
        except GeneratorExit:
            self.cancelled.set()
            raise
        words = str(asked.messages).count(" ")
        prompt_tokens = words + 100 * len(asked.pictures)
        yield Came(asked.number, [2], [-0.5], "length", prompt_tokens)


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    scripted = ScriptedEngine()

    class Scripted(Handler):
        engine: ClassVar[Any] = scripted
        tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, "a"))

    Scripted.tokenizer.decoder = decoders.Fuse()
    with ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        scripted.url = f"http://127.0.0.1:{server.server_port}/v1"
        yield scripted
        server.shutdown()
        thread.join()


async def ask(engine: ScriptedEngine, shape: Shape, extra: dict[str, Any]) -> tuple[Record, Target]:
    async with open_session(20.0) as http:
        target = await connect("openvino", engine.url, http)
        record = Record("openvino", "", 0, 0, "", shape.output_tokens, 0, scheduled=0.0)
        sent = body(shape, target.model, Words(), random.Random(0), extra)
        await send(target.transport, sent, record, 20.0)
    return record, target


def test_the_benchmark_can_connect_and_ask(engine: ScriptedEngine) -> None:
    shape = Shape(7, 5, (PICTURE, PICTURE))
    record, target = asyncio.run(ask(engine, shape, {"ignore_eos": True, "logprobs": True}))
    assert (record.error, record.detail) == ("", "")
    assert target.model == "m"
    assert target.words.tokens_per_word == 1.0
    assert (record.output_tokens, len(record.arrivals)) == (5, 5)
    assert record.prompt_tokens > 200
    asked = engine.asked[-1]
    assert [picture.shape for picture in asked.pictures] == [(1, 20, 30, 3)] * 2
    (message,) = asked.messages
    assert [part["type"] for part in message["content"]] == ["image", "image", "text"]
    assert asked.ignore_eos
    assert asked.logprobs


@pytest.mark.parametrize(
    ("shape", "extra", "error"),
    [
        (Shape(1, 2), {"stream": False}, "http_400"),
        (Shape(1, 2), {"max_tokens": None}, "http_400"),
        (Shape(1, TOO_MANY), {}, "stream_error"),
    ],
)
def test_what_it_refuses(
    engine: ScriptedEngine, shape: Shape, extra: dict[str, Any], error: str
) -> None:
    record, _ = asyncio.run(ask(engine, shape, extra))
    assert record.error == error


def test_a_client_that_leaves_frees_its_place(engine: ScriptedEngine) -> None:
    sent = body(Shape(1, FOREVER), "m", Words(), random.Random(0), {})
    with urllib.request.urlopen(f"{engine.url}/chat/completions", sent, timeout=20) as answer:
        assert answer.readline().startswith(b"data: {")
    assert engine.cancelled.wait(20)
