"""Three stage processes for the tests of one module, a planner and a client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio
import numpy as np
import pytest
from PIL import Image

from epd.errors import EpdError
from protos.epd.v1 import decode_pb2, prefill_pb2
from tests.conftest import TinyCheckpoint
from tests.e2e.stage_driver import Client, Planner, Request, said
from tests.e2e.stage_processes import Stages
from tests.tiny.reference import reference_generate

SETTINGS = {
    "kv__block_tokens": 8,
    "prefill__chunk_tokens": 7,
    "encode__arena_mib": 1,
    "transfer__read_deadline_s": 1.0,
    "transfer__quarantine_margin_s": 0.2,
}
_RANDOM = np.random.default_rng(0)
IMAGES = [
    Image.fromarray(_RANDOM.integers(0, 255, (height, width, 3), dtype=np.uint8))
    for height, width in ((40, 72), (64, 48), (50, 50))
]
TEXT: list[dict[str, Any]] = [{"role": "user", "content": "hello world, what is this?"}]


def ask(*parts: str) -> list[dict[str, Any]]:
    """A user's message; "*" is a picture."""
    content = [{"type": "image"} if p == "*" else {"type": "text", "text": p} for p in parts]
    return [{"role": "user", "content": content}]


def about(images: int, text: str = "what is it?") -> list[dict[str, Any]]:
    """A message of so many pictures, and then the text."""
    return ask(*["*"] * images, text)


ONE, THREE = ask("*", "describe"), ask("what", "*", "and", "*", "and", "*", "is it?")


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: TinyCheckpoint) -> Path:
    return tiny_checkpoint("qwen3_vl")


@pytest.fixture(scope="module")
def running_stages(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    with Stages(checkpoint, tmp_path_factory.mktemp("stages"), SETTINGS) as running:
        yield running


@pytest.fixture
def stages(running_stages: Stages) -> Stages:
    running_stages.make_whole()
    return running_stages


@pytest.fixture(scope="module")
def planner(checkpoint: Path) -> Planner:
    return Planner(checkpoint)


@asynccontextmanager
async def open_client(stages: Stages) -> AsyncIterator[Client]:
    """Afterwards nothing is held in any process."""
    made = Client(stages)
    yield made
    await made.close()
    left = await asyncio.to_thread(stages.idle)
    assert not left, f"left over after the test: {left}"


@pytest.fixture
async def stage_client(stages: Stages) -> AsyncIterator[Client]:
    async with open_client(stages) as client:
        yield client


async def drain(call: Any) -> None:
    """Read a call to its end."""
    while await call.read() is not grpc.aio.EOF:
        pass


async def typed(call: Any) -> EpdError:
    """Drain a call that must fail; the error it carries."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await drain(call)
    return await said(call, caught.value)


def reference(planner: Planner, messages: Any, images: Sequence[Image.Image] = ()) -> list[int]:
    return reference_generate(planner.checkpoint, messages, images).ids


async def read_until(call: Any, kind: str) -> Any:
    """Read events up to the first of `kind`; for what we send, read nothing."""
    if kind in ("job", "start"):
        return None
    while (event := await call.read()) is not grpc.aio.EOF:
        if event.WhichOneof("kind") == kind:
            return getattr(event, kind)
    raise AssertionError(f"no {kind}: {await call.code()}")


# -- a request, step by step ------------------------------------------------------


class Prefilled(NamedTuple):
    """A prefill call that has given its token and holds its blocks."""

    call: Any
    announced: list[prefill_pb2.KvReady]
    first: prefill_pb2.FirstToken

    @property
    def start(self) -> decode_pb2.DecodeRequest:
        """The first token, as decode is told of it."""
        start = decode_pb2.Start(first_token=self.first.token, kv_tokens=self.first.kv_tokens)
        return decode_pb2.DecodeRequest(start=start)


async def prefilled(client: Client, request: Request) -> Prefilled:
    """Prefill alone; pictures that it lacks are encoded and given back."""
    call = await client.start_prefill(request)
    announced: list[prefill_pb2.KvReady] = []
    encodes: list[Any] = []
    while True:
        event = await call.read()
        assert event is not grpc.aio.EOF, await call.code()
        if event.HasField("admitted"):
            for index in event.admitted.missing_items:
                encodes.append(await client.start_encode(request, index))
                handle = (await read_until(encodes[-1], "ready")).handle
                ready = prefill_pb2.EmbeddingReady(index=index, handle=handle)
                await call.write(prefill_pb2.PrefillRequest(embedding_ready=ready))
        elif event.HasField("kv_ready"):
            announced.append(event.kv_ready)
        elif event.HasField("first_token"):
            for encode in encodes:
                await encode.done_writing()
                assert await encode.code() is grpc.StatusCode.OK
            return Prefilled(call, announced, event.first_token)


async def decoding(
    client: Client, request: Request, announced: Sequence[prefill_pb2.KvReady]
) -> Any:
    """A decode call that was told of all blocks, and not yet of the first token."""
    call = await client.start_decode(request, 0)
    for ready in announced:
        await call.write(decode_pb2.DecodeRequest(kv_ready=ready))
    return call


async def given_back(prefill: Any) -> None:
    """Release prefill's blocks, as a reader that is done with them."""
    await prefill.done_writing()
    assert await prefill.code() is grpc.StatusCode.OK
