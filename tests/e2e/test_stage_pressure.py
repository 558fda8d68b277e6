"""The three processes with little memory: waiting, pushing out, chaos, and leaving."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from PIL import Image

from epd.errors import ErrorKind
from protos.epd.v1 import common_pb2, decode_pb2
from tests.conftest import TinyCheckpoint
from tests.e2e.stage_driver import Client, Planner, Request, greedy, next_event
from tests.e2e.stage_house import about, ask, decoding, given_back, prefilled, typed
from tests.e2e.stage_processes import StageProcess, Stages
from tests.tiny.reference import reference_generate
from tests.waiting import LIMIT_S, soon, until

BLOCK = 8
MOST_ROUNDS = 20
SETTINGS: dict[str, Any] = {
    "kv__block_tokens": BLOCK,
    "kv__prefill_tokens": 16 * BLOCK,
    "kv__decode_tokens": 20 * BLOCK,
    "prefill__chunk_tokens": 16,
    "prefill__landing_mib": 1,
    "encode__arena_mib": 1,
    "worker__grace_s": 3,
    "transfer__read_deadline_s": 1.0,
    "transfer__quarantine_margin_s": 0.2,
}
_RANDOM = np.random.default_rng(1)
IMAGES = [
    Image.fromarray(_RANDOM.integers(0, 255, (height, width, 3), dtype=np.uint8))
    for height, width in ((40, 72), (64, 48))
]


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: TinyCheckpoint) -> Path:
    return tiny_checkpoint("qwen2_vl")


@pytest.fixture(scope="module")
def running_stages(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    with Stages(checkpoint, tmp_path_factory.mktemp("pressure"), SETTINGS) as running:
        yield running


async def test_requests_that_are_pushed_out_come_again_and_lose_nothing(
    stages: Stages, planner: Planner
) -> None:
    """Four outputs of 60 tokens in a pool of 160: some must give way, once they meet."""
    client = Client(stages)
    asked = [ask("hello " * (i + 1)) for i in range(4)]
    whole = [
        reference_generate(planner.checkpoint, messages, (), 60, eos_token_id=None).ids
        for messages in asked
    ]
    sampling = greedy((), max_tokens=60)
    for _ in range(MOST_ROUNDS):
        requests = [planner.request(messages, (), sampling) for messages in asked]
        results = await asyncio.gather(*(client.run_resuming(request) for request in requests))
        assert [ids for ids, _ in results] == whole
        if any(pushed_out for _, pushed_out in results):
            break
    else:
        pytest.fail("the pool was never full")
    await client.close()
    assert not await asyncio.to_thread(stages.idle)


async def test_what_can_never_fit_is_refused_with_the_limit(
    stages: Stages, planner: Planner
) -> None:
    client = Client(stages)
    request = planner.request(ask("hello"), (), greedy((), max_tokens=10))
    long = request.token_ids * (16 * BLOCK // len(request.token_ids) + 1)
    error = await typed(await client.start_prefill(_with(request, long)))
    assert (error.kind, error.param) == (ErrorKind.CONTEXT_LENGTH_EXCEEDED, "job.token_ids")
    assert "kv.prefill_tokens" in error.message
    longer = request.token_ids * (20 * BLOCK // len(request.token_ids) + 1)
    error = await typed(await client.start_decode(_with(request, longer), 0))
    assert error.kind is ErrorKind.CONTEXT_LENGTH_EXCEEDED
    await client.close()


async def test_many_more_requests_than_memory_all_get_their_turn(
    stages: Stages, planner: Planner
) -> None:
    client = Client(stages)
    asked = [(about(i % 3, "what is it? " * (i % 4 + 1)), IMAGES[: i % 3]) for i in range(18)]
    requests = [planner.request(messages, images) for messages, images in asked]
    results = await asyncio.gather(*(client.run_resuming(request) for request in requests))
    for (messages, images), (ids, _) in zip(asked[:6], results, strict=False):
        assert ids == reference_generate(planner.checkpoint, messages, images).ids
    assert [ids for ids, _ in results[:6]] == [ids for ids, _ in results[12:]]
    await client.close()
    assert not await asyncio.to_thread(stages.idle)


async def test_streams_lost_at_random_leave_nothing_behind(
    stages: Stages, planner: Planner
) -> None:
    client = Client(stages)
    pick = random.Random(7)
    request = planner.request(about(2, "what?"), IMAGES)

    async def lose(after_s: float) -> None:
        running = asyncio.create_task(client.run_resuming(request))
        await asyncio.wait([running], timeout=after_s)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    for _ in range(3):
        await asyncio.gather(*(lose(pick.uniform(0, 0.8)) for _ in range(12)))
    left = await asyncio.to_thread(stages.idle)
    assert not left, left
    whole = reference_generate(planner.checkpoint, about(2, "what?"), IMAGES).ids
    assert (await client.run(request)).ids == whole
    await client.close()


async def test_a_worker_that_is_told_to_stop_finishes_what_runs(
    checkpoint: Path, stages: Stages, planner: Planner, tmp_path: Path
) -> None:
    """SIGTERM: running outputs end well, new work is refused, exit code 0."""
    settings = SETTINGS | {"worker__grace_s": LIMIT_S}
    leaving = StageProcess("decode", checkpoint, tmp_path / "log", **settings)
    leaving.wait_ready()
    mixed = Stages(checkpoint, tmp_path, {}, {**stages.processes, "decode": leaving})
    client = Client(mixed)
    request = planner.request(ask("hello"), (), greedy((), max_tokens=120))
    begun = await prefilled(client, request)
    decode = await decoding(client, request, begun.announced)
    await next_event(decode, "admitted")
    leaving.process.send_signal(signal.SIGTERM)
    await until(lambda: "leaving" in leaving.log())
    error = await typed(await client.start_decode(request, 0))
    assert error.kind is ErrorKind.NOT_STARTED
    await decode.write(begun.start)
    kinds = []
    while (event := await decode.read()) is not grpc.aio.EOF:
        kinds.append(event.WhichOneof("kind"))
    assert kinds[-1] == "finished"
    assert await asyncio.to_thread(leaving.process.wait, LIMIT_S) == 0
    begun.call.cancel()
    await client.close()


async def test_what_waits_for_a_leaving_decodes_blocks_is_read_by_another(
    checkpoint: Path, stages: Stages, planner: Planner, tmp_path: Path
) -> None:
    """It is given back before anything was read: prefill's blocks serve the other decode,
    are not computed again, and are free at once afterwards."""
    leaving = StageProcess("decode", checkpoint, tmp_path / "log", **SETTINGS)
    leaving.wait_ready()
    here = Client(Stages(checkpoint, tmp_path, {}, {**stages.processes, "decode": leaving}))
    there = Client(stages)
    keeping, _ = _long(planner, "hello ")
    request, messages = _long(planner, "what? ")
    kept = await prefilled(here, keeping)
    holds = await decoding(here, keeping, kept.announced)
    await next_event(holds, "admitted")
    await next_event(holds, "kv_fetched")
    await kept.call.done_writing()  # Start never comes: its blocks stay taken
    begun = await prefilled(here, request)
    waits = await decoding(here, request, begun.announced)
    await until(lambda: leaving.state()["waiting"] == 1)
    for call in (holds, waits):
        await call.write(decode_pb2.DecodeRequest(recall=common_pb2.Recall()))
    assert (await typed(waits)).kind is ErrorKind.NOT_STARTED
    assert leaving.state()["running"] == 1, "what holds blocks goes on"
    goes_on = await decoding(there, request, begun.announced)
    await goes_on.write(begun.start)
    ids = [begun.first.token.id]
    while (event := await goes_on.read()) is not grpc.aio.EOF:
        ids += [token.id for token in event.tokens.tokens]
    assert ids == reference_generate(planner.checkpoint, messages, (), 3, eos_token_id=None).ids
    await given_back(begun.call)
    holds.cancel()
    assert not await asyncio.to_thread(stages.idle)
    for client in (here, there):
        await client.close()
    assert await asyncio.to_thread(leaving.stop) == 0


def _long(planner: Planner, word: str) -> tuple[Request, list[dict[str, Any]]]:
    """More than half of decode's pool."""
    for times in range(1, 100):
        messages = ask(word * times)
        found = planner.request(messages, (), greedy((), max_tokens=3))
        if len(found.token_ids) > 11 * BLOCK:
            return found, messages
    raise AssertionError


async def test_what_outlasts_the_grace_ends_with_a_typed_error(
    checkpoint: Path, stages: Stages, planner: Planner, tmp_path: Path
) -> None:
    settings = SETTINGS | {"worker__grace_s": 0.3}
    leaving = StageProcess("prefill", checkpoint, tmp_path / "log", **settings)
    leaving.wait_ready()
    mixed = Stages(checkpoint, tmp_path, {}, {**stages.processes, "prefill": leaving})
    client = Client(mixed)
    call = await client.start_prefill(planner.request(about(1, "what?"), IMAGES[:1]))
    await next_event(call, "admitted")  # and the image never comes
    leaving.process.send_signal(signal.SIGTERM)
    with soon(20, instead_of="the image, for a minute"):
        error = await typed(call)
    assert error.kind is ErrorKind.STAGE_UNAVAILABLE
    assert await asyncio.to_thread(leaving.process.wait, LIMIT_S) == 0
    await client.close()


def _with(request: Request, token_ids: list[int]) -> Request:
    return replace(request, token_ids=token_ids, prompt_length=len(token_ids))
