"""A gateway over fakes, for tests: one object to add workers to and to ask."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from PIL import Image

from epd.config import Config
from epd.jobs import Stage
from epd.rpc import convert
from gateway.app import counts
from gateway.checkpoint import Loaded, load
from gateway.main import Gateway
from protos.epd.v1 import gateway_pb2 as pb
from tests.e2e.fake_stages import Call, Fake, Script, hello_of
from tests.e2e.http_client import Reply, post
from tests.waiting import until

CHECKPOINT = Path(__file__).parents[2] / "demo" / "checkpoint"
CHAT = "/v1/chat/completions"


def config(**gateway: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(CHECKPOINT), "name": "demo"},
            "gateway": {
                "http_port": 0,
                "grpc_port": 0,
                "membership_port": 0,
                "heartbeat_s": 0.05,
                # Above what a crowded machine keeps a healthy stage from saying.
                "dead_s": 3.0,
                "cancel_bound_s": 6.0,
                "preprocess_workers": 0,
                **gateway,
            },
            # A test that is looked at in a debugger stands still.
            "worker": {"wedged_s": 0},
            "limits": {"max_inflight": 8, "max_body_bytes": 1 << 20},
        }
    )


class House:
    """A gateway and its fakes."""

    def __init__(self, loaded: Loaded, config: Config) -> None:
        self.script = Script()
        # Few tests need its helper processes, which are half of what a gateway takes to start.
        with patch("epd.sandbox.AT_ONCE", False):
            self.gateway = Gateway.of(config, loaded)
        self.fakes: list[Fake] = []
        self.http = self.grpc = self.membership = ""
        self.capacity: dict[str, int] = {}
        """What workers say they hold."""
        self.hello = hello_of(loaded.spec)

    async def start(self) -> None:
        addresses = await self.gateway.start()
        self.http, self.grpc = addresses["http"], addresses["grpc"]
        self.membership = addresses["membership"]

    async def add(self, stage: Stage, name: str = "", port: int = 0) -> Fake:
        epoch = len(self.fakes) + 1
        fake = Fake(
            stage,
            name or str(stage),
            self.script,
            {**self.hello, "epoch": epoch, "capacity": self.capacity},
        )
        self.fakes.append(fake)
        await fake.start(self.membership, port)
        await until(lambda: fake.address in {w.card.address for w in self._live(stage)})
        return fake

    def _live(self, stage: Stage) -> list[Any]:
        return self.gateway.registry.live(stage)

    async def settled(self) -> None:
        """Every call is closed, on both sides."""
        service = self.gateway.service
        left = ("in_flight", "runs", "teardowns", "streams")
        await until(lambda: not any(counts(service)[what] for what in left))
        await until(lambda: not any(fake.calls for fake in self.fakes))

    async def close(self) -> None:
        # Workers first: a gateway that closes gives them a second to leave.
        await asyncio.gather(*(fake.stop() for fake in self.fakes))
        await self.gateway.close()

    @property
    def journal(self) -> list[str]:
        return self.script.journal

    async def chat(self, **fields: Any) -> Reply:
        return await post(self.http, CHAT, body(**fields))

    async def stream(self, **fields: Any) -> list[Any]:
        reply = await self.chat(stream=True, **fields)
        assert reply.status == 200, reply.body
        return reply.events()


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load(config().model)


@asynccontextmanager
async def opened(
    loaded: Loaded,
    limits: dict[str, Any] | None = None,
    *,
    stages: Iterable[Stage] = Stage,
    **gateway: Any,
) -> AsyncIterator[House]:
    """A house with settings of its own and a worker of each stage; afterwards nothing may be
    left of any request."""
    tree = config(**gateway).model_dump()
    tree["limits"].update(limits or {})
    house = House(loaded, Config.model_validate(tree))
    await house.start()
    try:
        for stage in stages:
            await house.add(stage)
        yield house
        await house.settled()
        assert house.gateway.service.budget.used == 0
    finally:
        await house.close()


@pytest.fixture
async def empty(loaded: Loaded) -> AsyncIterator[House]:
    """A gateway without workers."""
    async with opened(loaded, stages=()) as house:
        yield house


@pytest.fixture
async def house(empty: House) -> House:
    """One worker of each stage."""
    for stage in Stage:
        await empty.add(stage)
    return empty


def long_answer(house: House, tokens: int = 60_000) -> list[int]:
    """Let decode make megabytes of an answer; how many tokens it has made so far."""
    house.script.output = [400 + i % 50 for i in range(tokens)]
    house.script.tokens_per_message = 32
    house.script.alternatives = 20
    return _counted(house)


def ask(text: str = "what?") -> pb.ChatRequest:
    """A question over gRPC."""
    message = pb.Message(role=pb.ROLE_USER, parts=[pb.ContentPart(text=text)])
    return pb.ChatRequest(messages=[message])


def ask_much(house: House, monkeypatch: pytest.MonkeyPatch) -> tuple[pb.ChatRequest, list[int]]:
    """A question over gRPC whose answer is too long for a client that doesn't read it: fewer
    than 1400 tokens may be made. And how many are so far."""
    # More than the wire allows: the kernel's buffers on the way swallow megabytes.
    monkeypatch.setattr(convert, "_MAX_TOP", 800)
    house.script.output = [300] * 1500
    house.script.alternatives = 800
    request = ask()
    request.options.max_tokens = 1600
    request.options.logprobs = True
    request.options.top_logprobs = 20
    return request, _counted(house)


def _counted(house: House) -> list[int]:
    """How many tokens decode has made, from now on."""
    made = [0]

    async def count(call: Call) -> None:
        made[0] = call.token

    house.script.hooks["decode.token"] = count
    return made


def picture(colour: str = "red", size: tuple[int, int] = (64, 48)) -> dict[str, Any]:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def body(*, images: int = 0, **fields: Any) -> dict[str, Any]:
    colours = ("red", "green", "blue")
    content = [picture(colours[i]) for i in range(images)]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": "what is it?"}]}]
    return {"model": "demo", "messages": messages, "max_tokens": 64, **fields}


def raw(**fields: Any) -> bytes:
    return json.dumps(body(**fields)).encode()


def text_of(events: list[Any]) -> str:
    """What a stream of a chat said."""
    return "".join(
        event["choices"][0]["delta"].get("content", "")
        for event in events
        if event != "[DONE]" and event.get("choices")
    )


def before(journal: list[str], first: str, second: str) -> bool:
    """Whether two things happened in this order."""
    return journal.index(first) < journal.index(second)
