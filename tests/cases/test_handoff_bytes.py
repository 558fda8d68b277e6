"""Cases HND-*: what travels between the real stages is right, or it is refused.

Three processes over gRPC and Mooncake in exact mode, driven without a gateway, so that the
test can hand over what a gateway never would.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from PIL import Image

from epd.errors import EpdError, ErrorKind
from epd.jobs import DecodeJob
from epd.rpc.jobs import decode_job_to_proto
from protos.epd.v1 import common_pb2, decode_pb2, prefill_pb2
from tests.cases.pictures import counter
from tests.conftest import TinyCheckpoint
from tests.e2e.stage_driver import Client, Planner, Request, greedy, said
from tests.e2e.stage_house import about, decoding, given_back, open_client, prefilled
from tests.e2e.stage_processes import Stages
from tests.tiny.reference import reference_generate
from tests.waiting import LIMIT_S

BLOCK = 8
POOL = 40
"""Blocks of prefill's pool: small enough to write all over it."""
SETTINGS = {
    "model__exact": True,
    "kv__block_tokens": BLOCK,
    "kv__prefill_tokens": POOL * BLOCK,
    "prefill__step_tokens": 24,
    "prefill__chunk_tokens": 12,
    "transfer__read_deadline_s": 1.0,
    "transfer__quarantine_margin_s": 0.2,
}
_RANDOM = np.random.default_rng(5)
IMAGES = [
    Image.fromarray(_RANDOM.integers(0, 255, (height, width, 3), dtype=np.uint8))
    for height, width in ((56, 84), (84, 56), (112, 28))
]


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: TinyCheckpoint) -> Path:
    return tiny_checkpoint("qwen2_vl")


@pytest.fixture(scope="module")
def running_stages(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    with Stages(checkpoint, tmp_path_factory.mktemp("handoff"), SETTINGS) as running:
        yield running


@pytest.fixture
def stages(running_stages: Stages) -> Stages:
    running_stages.make_whole()
    return running_stages


@pytest.fixture(scope="module")
def planner(checkpoint: Path) -> Planner:
    return Planner(checkpoint)


@pytest.fixture
async def client(stages: Stages) -> AsyncIterator[Client]:
    """Afterwards nothing is held in any process, and all of them live."""
    pids = [process.process.pid for process in stages.processes.values()]
    async with open_client(stages) as made:
        yield made
    assert all(process.process.poll() is None for process in stages.processes.values())
    assert pids == [process.process.pid for process in stages.processes.values()]


def of_ids(planner: Planner, ids: Sequence[int], max_tokens: int) -> Request:
    spec = planner.spec
    sampling = greedy((), max_tokens=max_tokens)
    return Request(list(ids), len(ids), [], [], sampling, spec.fingerprint)


async def refusal(call: Any) -> EpdError:
    """Drain a call that must fail; nothing of an answer may come before."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await no_answer(call)
    return await said(call, caught.value)


async def no_answer(call: Any) -> None:
    while (event := await call.read()) is not grpc.aio.EOF:
        assert event.WhichOneof("kind") not in ("tokens", "finished", "kv_fetched")


# -- positions ------------------------------------------------------------------


@pytest.mark.parametrize("images", [0, 1, 3])
async def test_hnd_01_split_equals_joined_where_positions_jump(
    client: Client, planner: Planner, images: int
) -> None:
    """A picture's rows share positions, so text behind it has a delta: -8 and less here."""
    pictures = IMAGES[:images]
    request = planner.request(about(images), pictures)
    answer = await client.run(request)
    assert (answer.delta < 0) == (images > 0)
    assert answer.ids == reference_generate(planner.checkpoint, about(images), pictures).ids
    other = replace(request, name="other", nonce=request.nonce ^ 1)
    if images:  # and it is used: another delta is another answer
        begun = await prefilled(client, other)
        decode = await decoding(client, other, begun.announced)
        await decode.write(begun.start)
        assert await rest_of(decode) != answer.ids[1:]
        await given_back(begun.call)


async def rest_of(call: Any) -> list[int]:
    """The ids that decode makes."""
    ids: list[int] = []
    while (event := await call.read()) is not grpc.aio.EOF:
        ids += [token.id for token in event.tokens.tokens]
    assert await call.code() is grpc.StatusCode.OK
    return ids


async def test_hnd_01_decode_refuses_a_job_without_it(client: Client, planner: Planner) -> None:
    request = planner.request(about(1), IMAGES[:1])
    call = client.decode.Run(timeout=LIMIT_S)
    job = decode_job_to_proto(
        DecodeJob(
            request.name, 0, request.nonce, tuple(request.token_ids), request.prompt_length,
            tuple(request.items), request.sampling, -5,
        ),
        request.fingerprint,
    )  # fmt: skip
    job.ClearField("position_delta")
    await call.write(decode_pb2.DecodeRequest(job=job))
    error = await refusal(call)
    assert error.kind is ErrorKind.CONTRACT_MISMATCH
    assert error.mapping.grpc_code is grpc.StatusCode.FAILED_PRECONDITION
    assert "position_delta" in error.message


async def test_hnd_02_a_delta_belongs_to_its_request(client: Client, planner: Planner) -> None:
    """A decodes for long while pictures of other sizes are prefilled, in chunks, beside it."""
    sampling = greedy((), max_tokens=80)
    long = planner.request(about(1), IMAGES[:1], sampling)
    alone = (await client.run(long)).ids
    running = asyncio.create_task(client.run(replace(long, nonce=long.nonce ^ 1)))
    others = []
    while not running.done():
        for images in (1, 2, 3):
            other = planner.request(about(images, "and this?"), IMAGES[-images:])
            others.append((images, (await client.run(other)).ids))
    assert (await running).ids == alone
    whole = reference_generate(planner.checkpoint, about(1), IMAGES[:1], 80, eos_token_id=None)
    assert alone == whole.ids
    for images, ids in others[:3]:
        messages, pictures = about(images, "and this?"), IMAGES[-images:]
        assert ids == reference_generate(planner.checkpoint, messages, pictures).ids


# -- lengths --------------------------------------------------------------------


async def test_hnd_11_every_length_around_the_edge_of_a_block(
    client: Client, planner: Planner
) -> None:
    """1 to 3 blocks and one: what decode says after a prompt is what prefill says after the
    prompt and decode's first words."""
    last = 3 * BLOCK + 1
    chain = [7, *(await client.run(of_ids(planner, [7], last + 4))).ids]
    for length in range(1, last + 1):
        split = (await client.run(of_ids(planner, chain[:length], 4))).ids
        assert split == chain[length : length + 4], length
        joined = (await client.run(of_ids(planner, chain[:length], 1))).ids
        assert joined == chain[length : length + 1], length


async def test_hnd_05_hnd_03_how_many_tokens_prefill_and_decode_make(
    client: Client, planner: Planner, stages: Stages
) -> None:
    steps = stages.processes["decode"].state()["steps"]
    ids = (await client.run(of_ids(planner, [3, 4, 5], 1))).ids
    assert len(ids) == 1
    stopping = greedy((), max_tokens=9, stop_token_ids=tuple(ids))
    answer = await client.run(replace(of_ids(planner, [3, 4, 5], 9), sampling=stopping))
    assert (answer.ids, answer.finish) == (ids, common_pb2.FINISH_REASON_STOP)
    assert stages.processes["decode"].state()["steps"] == steps, "decode made a token"
    two = await client.run(of_ids(planner, [3, 4, 5], 2))
    assert (len(two.ids), two.finish) == (2, common_pb2.FINISH_REASON_LENGTH)


async def test_hnd_06_more_than_prefills_pool_is_an_error_at_both_ends(
    client: Client, planner: Planner, stages: Stages
) -> None:
    """Decode's pool would hold it."""
    request = of_ids(planner, [9] * (POOL * BLOCK + 1), 8)
    error = await refusal(await client.start_prefill(request))
    assert error.kind is ErrorKind.CONTEXT_LENGTH_EXCEEDED
    assert stages.processes["decode"].state()["streams"] == 0
    fits = of_ids(planner, [9] * (POOL * BLOCK), 8)
    assert len((await client.run(fits)).ids) == 8


@pytest.mark.parametrize("length", [BLOCK, 3 * BLOCK, 3 * BLOCK + 1])
async def test_hnd_10_the_same_prompt_again_and_again(
    client: Client, planner: Planner, length: int
) -> None:
    """Prompts of whole blocks: the last time there may be nothing left to transfer."""
    ids = [11, 12, 13, 14] * (length // 4) + [15] * (length % 4)
    first = (await client.run(of_ids(planner, ids, 3))).ids
    for _ in range(8):
        async with asyncio.timeout(LIMIT_S):
            assert (await client.run(of_ids(planner, ids, 3))).ids == first
    at_once = [client.run(of_ids(planner, ids, 3)) for _ in range(12)]
    async with asyncio.timeout(LIMIT_S):
        assert {tuple(a.ids) for a in await asyncio.gather(*at_once)} == {tuple(first)}


# -- references -----------------------------------------------------------------


async def test_hnd_13_two_requests_of_one_name_and_nonce(client: Client, planner: Planner) -> None:
    """Names are for logs: each call has its own blocks and gives them back."""
    one = of_ids(planner, range(20, 50), 6)
    two = replace(of_ids(planner, range(60, 95), 6), name=one.name, nonce=one.nonce)
    alone = [(await client.run(request)).ids for request in (one, two)]
    for _ in range(3):
        both = await asyncio.gather(client.run(one), client.run(two), client.run(one))
        assert [answer.ids for answer in both] == [alone[0], alone[1], alone[0]]


Spoil = Callable[[prefill_pb2.KvReady], None]


def _next_epoch(ready: prefill_pb2.KvReady) -> None:
    ready.handle.owner.epoch ^= 1


def _out_of_range(ready: prefill_pb2.KvReady) -> None:
    ready.handle.spans[-1].address = 1 << 40


def _elsewhere(ready: prefill_pb2.KvReady) -> None:
    ready.handle.spans[0].address += ready.handle.spans[0].length


def _another_request(ready: prefill_pb2.KvReady) -> None:
    ready.handle.contract.nonce ^= 1


REFERENCES: list[tuple[Spoil, ErrorKind]] = [
    (_next_epoch, ErrorKind.CONTRACT_MISMATCH),
    (_out_of_range, ErrorKind.TRANSFER_FAILED),
    (_elsewhere, ErrorKind.CHECKSUM_MISMATCH),
    (_another_request, ErrorKind.CONTRACT_MISMATCH),
]


@pytest.mark.parametrize(("spoil", "kind"), REFERENCES)
async def test_hnd_15_a_reference_that_is_not_ours_fails_the_request(
    client: Client, planner: Planner, stages: Stages, spoil: Spoil, kind: ErrorKind
) -> None:
    before = counter(stages.processes["decode"].get("/metrics").decode(), "epd_errors_total")
    request = of_ids(planner, range(30, 50), 6)
    request.salt = secrets.token_bytes(8)  # no cache knows it: it must be read
    prefill, announced, _ = await prefilled(client, request)
    spoil(announced[0])
    decode = await client.start_decode(request, 0)
    await decode.write(decode_pb2.DecodeRequest(kv_ready=announced[0]))
    assert (await refusal(decode)).kind is kind
    after = counter(stages.processes["decode"].get("/metrics").decode(), "epd_errors_total")
    assert after == before + 1
    await given_back(prefill)
    assert len((await client.run(request)).ids) == 6


async def test_hnd_15_a_reference_to_blocks_that_were_given_to_another(
    client: Client, planner: Planner
) -> None:
    """Released, and all of the pool was written over since: nothing of it is read as ours."""
    request = of_ids(planner, range(41, 71), 6)
    request.salt = secrets.token_bytes(8)
    begun = await prefilled(client, request)
    await given_back(begun.call)
    for fill in (1, 2):
        await client.run(of_ids(planner, [fill] * (POOL * BLOCK), 1))
    decode = await client.start_decode(request, 0)
    for ready in begun.announced:
        await send(decode, decode_pb2.DecodeRequest(kv_ready=ready))
    await send(decode, begun.start)
    assert (await refusal(decode)).kind is ErrorKind.CHECKSUM_MISMATCH


async def test_hnd_15_a_reference_used_twice_is_out_of_order(
    client: Client, planner: Planner
) -> None:
    request = of_ids(planner, range(40, 70), 6)
    prefill, announced, _ = await prefilled(client, request)
    decode = await client.start_decode(request, 0)
    for ready in (announced[0], announced[0]):
        await send(decode, decode_pb2.DecodeRequest(kv_ready=ready))
    assert (await refusal(decode)).kind is ErrorKind.INVALID_REQUEST
    await given_back(prefill)


async def send(call: Any, message: Any) -> None:
    """Into a call that may have ended already: `refusal` then says why."""
    try:
        await call.write(message)
    except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
        return


async def test_hnd_26_a_probe_set_split_and_joined(client: Client, planner: Planner) -> None:
    """Twelve prompts against the whole model in one process: ids, and the first likelihood."""
    for number in range(12):
        images = number % 3
        pictures = IMAGES[:images]
        messages = about(images, "hello world " * number + "what is it?")
        sampling = greedy(planner.spec.eos_token_ids, max_tokens=8, logprobs=True)
        answer = await client.run(planner.request(messages, pictures, sampling))
        whole = reference_generate(planner.checkpoint, messages, pictures, 8)
        assert answer.ids == whole.ids, number
        expected = whole.logits[0].log_softmax(-1)[whole.ids[0]]
        assert answer.tokens[0].logprob == pytest.approx(float(expected), abs=2e-3)
