"""Three stage processes for the tests of one module, a planner and a client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from PIL import Image

from epd.errors import EpdError
from epd.rpc.status import from_rpc_error
from tests.conftest import TinyCheckpoint
from tests.e2e.stage_driver import Client, Planner
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


ONE, THREE = ask("*", "describe"), ask("what", "*", "and", "*", "and", "*", "is it?")


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: TinyCheckpoint) -> Path:
    return tiny_checkpoint("qwen3_vl")


@pytest.fixture(scope="module")
def stages(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    with Stages(checkpoint, tmp_path_factory.mktemp("stages"), SETTINGS) as running:
        yield running


@pytest.fixture(scope="module")
def planner(checkpoint: Path) -> Planner:
    return Planner(checkpoint)


@pytest.fixture
async def stage_client(stages: Stages) -> AsyncIterator[Client]:
    made = Client(stages)
    yield made
    await made.close()
    left = await asyncio.to_thread(stages.idle)
    assert not left, f"left over after the test: {left}"


async def drain(call: Any) -> None:
    """Read a call to its end."""
    while await call.read() is not grpc.aio.EOF:
        pass


async def typed(call: Any) -> EpdError:
    """Drain a call that must fail; the error it carries."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await drain(call)
    return from_rpc_error(caught.value)


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
