"""Streams that end early, late or slowly: what was held comes back."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from protos.epd.v1 import common_pb2, decode_pb2, prefill_pb2
from tests.e2e.stage_driver import Client, Planner, Request, greedy, next_event
from tests.e2e.stage_house import IMAGES, ONE, TEXT, decoding, drain, prefilled, read_until
from tests.e2e.stage_processes import Stages
from tests.waiting import until


@pytest.fixture
def client(stage_client: Client) -> Client:
    return stage_client


# -- early ends -----------------------------------------------------------------
# The client fixture checks after every test that nothing is held any more.


@pytest.mark.parametrize("after", ["job", "accepted", "ready"])
async def test_encode_gives_everything_back_when_its_stream_is_lost(
    client: Client, planner: Planner, stages: Stages, after: str
) -> None:
    call = await client.start_encode(planner.request(ONE, IMAGES[:1]), 0)
    if after != "job":
        await next_event(call, "accepted")
    if after == "ready":
        await next_event(call, "ready")
    call.cancel()
    if after == "ready":
        await eventually(stages, "encode", "quarantined_bytes", above=0)


async def test_encode_half_closed_early_ends_by_itself(client: Client, planner: Planner) -> None:
    call = await client.start_encode(planner.request(ONE, IMAGES[:1]), 0)
    await call.done_writing()
    try:
        await drain(call)
    except grpc.aio.AioRpcError:
        assert await call.code() is grpc.StatusCode.CANCELLED
    else:  # the item was ready before the half-close was seen
        assert await call.code() is grpc.StatusCode.OK


@pytest.mark.parametrize("after", ["job", "admitted", "kv_ready", "first_token"])
async def test_prefill_quarantines_what_was_announced_when_its_stream_is_lost(
    client: Client, planner: Planner, stages: Stages, after: str
) -> None:
    call = await client.start_prefill(planner.request(TEXT))
    await read_until(call, after)
    call.cancel()
    if after in ("kv_ready", "first_token"):
        await eventually(stages, "prefill", "quarantined_bytes", above=0)


@pytest.mark.parametrize("after", ["admitted", "kv_ready", "first_token"])
async def test_prefill_cancelled_in_good_order_frees_at_once(
    client: Client, planner: Planner, stages: Stages, after: str
) -> None:
    call = await client.start_prefill(planner.request(TEXT))
    await read_until(call, after)
    await call.write(prefill_pb2.PrefillRequest(cancel=common_pb2.Cancel(reason="test")))
    terminal = await read_until(call, "reads_terminal")
    assert terminal.clean
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK
    assert stages.processes["prefill"].state()["quarantined_bytes"] == 0


async def test_prefill_waiting_for_an_image_can_be_cancelled(
    client: Client, planner: Planner
) -> None:
    call = await client.start_prefill(planner.request(ONE, IMAGES[:1]))
    await read_until(call, "admitted")
    await call.write(prefill_pb2.PrefillRequest(cancel=common_pb2.Cancel()))
    assert (await read_until(call, "reads_terminal")).clean
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.OK


@pytest.mark.parametrize("how", ["cancel", "lost"])
@pytest.mark.parametrize("after", ["start", "admitted", "kv_fetched", "tokens"])
async def test_decode_gives_everything_back(
    client: Client, planner: Planner, after: str, how: str
) -> None:
    request = planner.request(TEXT, (), greedy(max_tokens=2000))
    prefill, decode = await hand_over(client, request)
    await read_until(decode, after)
    if how == "lost":
        decode.cancel()
    else:
        await decode.write(decode_pb2.DecodeRequest(cancel=common_pb2.Cancel(reason="test")))
        assert (await read_until(decode, "reads_terminal")).clean
        assert await decode.code() is grpc.StatusCode.OK
    await prefill.done_writing()
    assert await prefill.code() is grpc.StatusCode.OK


async def test_a_deadline_is_like_a_lost_stream(
    client: Client, planner: Planner, stages: Stages
) -> None:
    call = await client.start_prefill(planner.request(ONE, IMAGES[:1]), timeout_s=0.5)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await drain(call)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_slow_reader_loses_nothing_and_holds_up_nobody(
    client: Client, planner: Planner
) -> None:
    sampling = greedy(max_tokens=300, logprobs=True, top_logprobs=20)
    request = planner.request(TEXT, (), sampling)
    prefill, decode = await hand_over(client, request)
    await prefill.done_writing()
    await read_until(decode, "tokens")
    for _ in range(3):
        assert len((await client.run(planner.request(TEXT))).ids) == 16
    indices, sizes = [], []
    while not (event := await decode.read()).HasField("finished"):
        sizes.append(len(event.tokens.tokens))
        indices.append(event.tokens.first_index)
        await asyncio.sleep(0.005)
    assert event.finished.output_tokens == 300
    assert indices == [2 + sum(sizes[:i]) for i in range(len(sizes))]
    assert sum(sizes) == 298


async def hand_over(client: Client, request: Request) -> tuple[Any, Any]:
    """Prefill a text request and start decode on it; both calls."""
    begun = await prefilled(client, request)
    decode = await decoding(client, request, begun.announced)
    await decode.write(begun.start)
    return begun.call, decode


async def eventually(stages: Stages, stage: str, name: str, above: int) -> None:
    await until(lambda: stages.processes[stage].state()[name] > above)
