"""Owners that announce wrong bytes, readers whose reads fail: typed errors, never garbage."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from PIL import Image

from tests.conftest import TinyCheckpoint
from tests.e2e.stage_driver import Client, Planner, Request, StageFailed
from tests.e2e.stage_house import open_client
from tests.e2e.stage_processes import Stages
from tests.tiny.reference import reference_generate

SETTINGS = {"transfer__read_deadline_s": 1.0, "transfer__quarantine_margin_s": 0.2}
FAULTS = {
    "encode": "lease.stale:1/2",
    "prefill": "lease.wrong_rows:1/2",
    "decode": "transfer.fail:1/3",
}
"""Fault points count their passages, so it is known which request meets which fault."""
WRONG, FAILED = grpc.StatusCode.DATA_LOSS, grpc.StatusCode.UNAVAILABLE
EXPECTED = [
    WRONG,  # encode's rows changed after they were summed; prefill never announces
    FAILED,  # prefill's 1st announcement is of other blocks, but decode's 1st read fails
    WRONG,
    None,  # 2nd announcement, 2nd read: all is well
    WRONG,
    WRONG,  # 3rd announcement: other blocks, and they are read
    WRONG,
    FAILED,  # 4th read
    WRONG,
    WRONG,  # 5th announcement
    WRONG,
    None,  # 6th
]
PICTURE = Image.fromarray(np.random.default_rng(3).integers(0, 255, (48, 64, 3), dtype=np.uint8))
ASK: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}
]


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: TinyCheckpoint) -> Path:
    return tiny_checkpoint("qwen2_vl")


@pytest.fixture
def stages(checkpoint: Path, tmp_path: Path) -> Iterator[Stages]:
    """Of each try its own: they count."""
    with Stages(checkpoint, tmp_path, SETTINGS, faults=FAULTS) as running:
        yield running


@pytest.fixture
async def client(stages: Stages) -> AsyncIterator[Client]:
    async with open_client(stages) as made:
        yield made


async def test_wrong_bytes_and_failed_reads_end_in_typed_errors_never_in_an_answer(
    client: Client, checkpoint: Path
) -> None:
    planner = Planner(checkpoint)
    whole = reference_generate(checkpoint, ASK, [PICTURE])
    for number, expected in enumerate(EXPECTED):
        code, ids = await outcome(client, planner.request(ASK, [PICTURE]))
        assert code is expected, f"request {number}"
        assert ids == ([] if expected else whole.ids)


async def outcome(client: Client, request: Request) -> tuple[grpc.StatusCode | None, list[int]]:
    """(status of a failure, ids of an answer)"""
    try:
        return None, (await client.run(request)).ids
    except StageFailed as error:
        return error.code, []
    except grpc.aio.AioRpcError as error:
        return error.code(), []
