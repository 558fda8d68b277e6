"""The three real processes over gRPC and Mooncake, without a gateway."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from PIL import Image

from epd.errors import EpdError, ErrorKind
from epd.rpc.status import from_rpc_error
from protos.epd.v1 import common_pb2, decode_pb2, encode_pb2, prefill_pb2
from tests.e2e.stage_driver import (
    Answer,
    Client,
    Planner,
    Request,
    continued,
    greedy,
    next_event,
    png,
)
from tests.e2e.stage_house import IMAGES, ONE, TEXT, THREE, ask, read_until, reference, typed
from tests.e2e.stage_processes import Stages
from tests.e2e.test_encode_cache import counter


@pytest.fixture
def client(stage_client: Client) -> Client:
    return stage_client


# -- answers ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "images"),
    [(TEXT, []), (ONE, IMAGES[:1]), (THREE, IMAGES)],
    ids=["text", "one", "three"],
)
async def test_tokens_equal_those_of_the_whole_model(
    client: Client, planner: Planner, messages: Any, images: list[Image.Image]
) -> None:
    answer = await client.run(planner.request(messages, images))
    assert answer.ids == reference(planner, messages, images)
    assert answer.output_tokens == len(answer.ids) == 16
    assert answer.finish == common_pb2.FINISH_REASON_LENGTH


async def test_images_may_be_ready_in_any_order(client: Client, planner: Planner) -> None:
    request = planner.request(THREE, IMAGES)
    answer = await client.run(request, encode_order=[2, 0, 1])
    assert answer.ids == reference(planner, THREE, IMAGES)


async def test_the_text_before_an_image_is_prefilled_while_it_is_missing(
    client: Client, planner: Planner
) -> None:
    messages = ask("this is a long text before the picture " * 3, "*", "describe")
    request = planner.request(messages, IMAGES[:1])
    first_placeholder = request.token_ids.index(planner.spec.image_token_id)
    call = await client.start_prefill(request)
    admitted = await next_event(call, "admitted")
    assert list(admitted.missing_items) == [0]
    tokens = 0
    while tokens + 8 <= first_placeholder:  # whole blocks of text only
        tokens = (await next_event(call, "kv_ready")).tokens
    assert tokens <= first_placeholder
    call.cancel()


async def test_eight_requests_at_once(client: Client, planner: Planner) -> None:
    wanted = [
        (ask("hello " * (3 * i), *["*"] * (i % 3), "what?"), IMAGES[: i % 3]) for i in range(8)
    ]
    requests = [planner.request(messages, images) for messages, images in wanted]
    answers = await asyncio.gather(*(client.run(request) for request in requests))
    for (messages, images), answer in zip(wanted, answers, strict=True):
        assert answer.ids == reference(planner, messages, images)


async def test_one_token_is_prefills_business_alone(
    client: Client, planner: Planner, stages: Stages
) -> None:
    steps = stages.processes["decode"].state()["steps"]
    sampling = greedy(planner.spec.eos_token_ids, max_tokens=1)
    answer = await client.run(planner.request(ONE, IMAGES[:1], sampling))
    assert answer.ids == reference(planner, ONE, IMAGES[:1])[:1]
    assert answer.finish == common_pb2.FINISH_REASON_LENGTH
    assert "prefill.kv_ready" not in answer.events
    assert stages.processes["decode"].state()["steps"] == steps


async def test_a_stop_id_ends_the_output_wherever_it_is_sampled(
    client: Client, planner: Planner
) -> None:
    ids = reference(planner, THREE, IMAGES)
    for place in (0, 5):
        stop = ids[place]
        expected = ids[: ids.index(stop) + 1]
        sampling = greedy(planner.spec.eos_token_ids, stop_token_ids=(stop,))
        answer = await client.run(planner.request(THREE, IMAGES, sampling))
        assert answer.ids == expected
        assert answer.finish == common_pb2.FINISH_REASON_STOP


async def test_sampling_is_repeatable_and_survives_a_failover(
    client: Client, planner: Planner
) -> None:
    """Noise, penalties and limits are rebuilt from the ids alone."""
    sampling = greedy(
        planner.spec.eos_token_ids,
        temperature=1.5,
        seed=1234,
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        logprobs=True,
        top_logprobs=3,
    )
    request = planner.request(ONE, IMAGES[:1], sampling)
    whole = await client.run(request)
    assert len(whole.ids) == 16
    assert all(len(token.top) == 3 and token.HasField("logprob") for token in whole.tokens)
    assert (await client.run(request)).ids == whole.ids
    for cut in (1, 9):
        rest: Answer = await client.run(continued(request, whole.ids[:cut]))
        assert whole.ids[:cut] + rest.ids == whole.ids
        assert rest.output_tokens == 16
    other = replace(request, sampling=replace(sampling, seed=99))
    assert (await client.run(other)).ids != whole.ids


async def test_embeddings_and_kv_go_through_the_transfer_engine(
    client: Client, planner: Planner, stages: Stages
) -> None:
    def moved(stage: str, kind: str) -> float:
        for line in stages.processes[stage].get("/metrics").decode().splitlines():
            if line.startswith("epd_transfer_bytes_total") and f'kind="{kind}"' in line:
                return float(line.rpartition(" ")[2])
        return 0.0

    before = moved("prefill", "embedding"), moved("decode", "kv")
    request = replace(planner.request(ONE, IMAGES[:1]), salt=secrets.token_bytes(8))
    await client.run(request)
    spec = planner.spec
    rows = spec.planes * request.items[0].rows * spec.hidden * 4
    assert moved("prefill", "embedding") - before[0] == rows
    blocks = -(-len(request.token_ids) // 8)
    token_bytes = 3 * 2 * 2 * 16 * 4  # layers, K and V, heads, head size, float32
    assert moved("decode", "kv") - before[1] == blocks * 8 * token_bytes


# -- bad input ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"not an image", ErrorKind.INVALID_IMAGE),
        (png(IMAGES[0])[:-200], ErrorKind.INVALID_IMAGE),
        (png(IMAGES[1]), ErrorKind.INVALID_IMAGE),
    ],
    ids=["garbage", "truncated", "another size"],
)
async def test_a_bad_picture_fails_its_own_stream_only(
    client: Client, planner: Planner, data: bytes, kind: ErrorKind
) -> None:
    good = planner.request(ONE, IMAGES[:1])
    bad = replace(planner.request(ONE, IMAGES[:1]), files=[data])
    running = asyncio.create_task(client.run(good))
    error = await typed(await client.start_encode(bad, 0))
    assert (error.kind, error.param) == (kind, "job.image")
    assert (await running).ids == reference(planner, ONE, IMAGES[:1])


async def test_a_picture_larger_than_the_arena_names_the_limit(
    client: Client, planner: Planner
) -> None:
    request = planner.request(ONE, IMAGES[:1])
    huge = replace(request, items=[replace(request.items[0], rows=1 << 20)])
    error = await typed(await client.start_encode(huge, 0))
    assert error.kind is ErrorKind.IMAGE_TOO_LARGE
    assert "encode.arena_mib" in error.message


async def test_a_job_for_other_weights_is_refused_by_every_stage(
    client: Client, planner: Planner
) -> None:
    request = replace(planner.request(ONE, IMAGES[:1]), fingerprint="0" * 64)
    for call in (
        await client.start_encode(request, 0),
        await client.start_prefill(request),
        await client.start_decode(request, 0),
    ):
        assert (await typed(call)).kind is ErrorKind.CONTRACT_MISMATCH


async def test_the_first_message_must_be_the_job_and_only_once(
    client: Client, planner: Planner
) -> None:
    for stub, message in (
        (client.encode, encode_pb2.EncodeRequest()),
        (client.prefill, prefill_pb2.PrefillRequest(cancel=common_pb2.Cancel())),
        (client.decode, decode_pb2.DecodeRequest(start=decode_pb2.Start())),
    ):
        call: Any = stub.Run(timeout=10)
        await call.write(message)
        error = await typed(call)
        assert (error.kind, error.param) == (ErrorKind.INVALID_REQUEST, "job")
    request = planner.request(ONE, IMAGES[:1])
    call = await client.start_prefill(request)
    await next_event(call, "admitted")
    await call.write(prefill_pb2.PrefillRequest(job=prefill_pb2.PrefillJob()))
    error = await typed(call)
    assert (error.kind, error.param) == (ErrorKind.INVALID_REQUEST, "job")


# -- hand-offs that don't match -------------------------------------------------


@pytest.mark.parametrize("field", ["nonce", "fingerprint", "dtype", "layout", "shape", "length"])
async def test_a_handle_that_promises_other_bytes_is_refused(
    client: Client, planner: Planner, field: str
) -> None:
    def spoil(handle: common_pb2.Handle) -> common_pb2.Handle:
        contract = handle.contract
        if field == "nonce":
            contract.nonce ^= 1
        elif field == "shape":
            contract.shape[1] += 1
        elif field == "length":
            handle.spans[0].length -= 4
        else:
            setattr(contract, field, "other")
        return handle

    for error in await refusals(client, planner, spoil):
        assert error.kind is ErrorKind.CONTRACT_MISMATCH
        assert field in error.message


async def test_bytes_with_another_sum_are_refused_and_counted(
    client: Client, planner: Planner, stages: Stages
) -> None:
    def spoil(handle: common_pb2.Handle) -> common_pb2.Handle:
        handle.spans[0].checksum ^= 1
        return handle

    before = damaged(stages)
    for error in await refusals(client, planner, spoil):
        assert error.kind is ErrorKind.CHECKSUM_MISMATCH
    assert damaged(stages) == [count + 1 for count in before]


def damaged(stages: Stages) -> list[float]:
    """Embeddings and KV that arrived with another sum, as transfers and as errors."""
    found = []
    for stage, kind in (("prefill", "embedding"), ("decode", "kv")):
        page = stages.processes[stage].get("/metrics").decode()
        failures, errors = "epd_transfer_failures_total", "epd_errors_total"
        found.append(counter(page, failures, kind=kind, reason="checksum"))
        found.append(counter(page, errors, kind="checksum_mismatch", stage=stage))
    return found


async def refusals(
    client: Client, planner: Planner, spoil: Callable[[common_pb2.Handle], common_pb2.Handle]
) -> tuple[EpdError, EpdError]:
    """What prefill says to a spoiled embedding, and decode to spoiled KV."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.run(planner.request(ONE, IMAGES[:1]), on_embedding=spoil)
    request = replace(planner.request(TEXT), salt=secrets.token_bytes(8))
    prefill = await client.start_prefill(request)
    ready = await read_until(prefill, "kv_ready")
    spoil(ready.handle)
    decode = await client.start_decode(request, 0)
    await decode.write(decode_pb2.DecodeRequest(kv_ready=ready))
    refused = await typed(decode)
    prefill.cancel()
    return from_rpc_error(caught.value), refused


async def test_an_address_outside_registered_memory_fails_the_request_only(
    client: Client, planner: Planner
) -> None:
    def spoil(handle: common_pb2.Handle) -> common_pb2.Handle:
        handle.spans[0].address = 4096
        return handle

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.run(planner.request(ONE, IMAGES[:1]), on_embedding=spoil)
    assert from_rpc_error(caught.value).kind is ErrorKind.TRANSFER_FAILED
    answer = await client.run(planner.request(TEXT))
    assert answer.ids == reference(planner, TEXT)


async def test_decode_never_runs_on_less_than_all_kv(client: Client, planner: Planner) -> None:
    request = planner.request(TEXT)
    prefill = await client.start_prefill(request)
    delta = (await next_event(prefill, "admitted")).position_delta
    ready = await next_event(prefill, "kv_ready")
    for message, kind in (
        (
            decode_pb2.DecodeRequest(start=decode_pb2.Start(kv_tokens=8)),
            ErrorKind.CONTRACT_MISMATCH,
        ),
        (decode_pb2.DecodeRequest(kv_ready=ready), ErrorKind.INVALID_REQUEST),
    ):
        decode = await client.start_decode(request, delta)
        await decode.write(decode_pb2.DecodeRequest(kv_ready=ready))
        await decode.write(message)
        assert (await typed(decode)).kind is kind
    prefill.cancel()


def test_request_logs_carry_their_id(stages: Stages, planner: Planner) -> None:
    async def go() -> Request:
        client = Client(stages)
        request = planner.request(ONE, IMAGES[:1])
        await client.run(request)
        await client.close()
        return request

    name = asyncio.run(go()).name
    for process in stages.processes.values():
        assert f"[{name}]" in process.log()
