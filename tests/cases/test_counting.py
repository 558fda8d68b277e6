"""Cases OPS-07, OPS-08: what the counters say is what happened, and each of them moves."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc.aio
import pytest
from prometheus_client import REGISTRY

from encode.images import ImagePreparer
from epd.config import Config, FetchConfig, TransferConfig
from epd.errors import EpdError, ErrorKind
from epd.sandbox import Sandbox, WorkerDied
from epd.transfer.arena import page_aligned
from epd.transfer.engine import Engine
from epd.transfer.pieces import Piece
from gateway.completions import CompletionEncoder
from gateway.fetch.fetcher import Fetcher
from gateway.openai import Encoder
from gateway.response_encoder import ResponseEncoder
from gateway.schema import parse_body
from prefill.ticket import Admitted, EmbeddingFetched, FirstToken
from protos.epd.v1 import gateway_pb2_grpc
from tests.e2e.cluster import ROOT
from tests.e2e.fake_stages import Call, fail, hang
from tests.e2e.gateway_house import CHAT, House, ask, raw
from tests.e2e.http_client import Connection, get, post
from tests.e2e.peer_process import Memory, PeerProcess
from tests.unit import decode_bench, prefill_bench, test_encode_worker
from tests.unit.fake_stage import IMAGE, POISON, prefill_job
from tests.unit.test_policy_metrics import documented
from tests.waiting import until


def ended() -> Counter[str]:
    """Requests for answers, by how they ended."""
    found: Counter[str] = Counter()
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            if sample.name == "epd_requests_total" and sample.labels["stage"] == "gateway":
                found[sample.labels["outcome"]] += int(sample.value)
    return found


def errors() -> int:
    """Typed errors that the gateway sent."""
    return sum(
        int(sample.value)
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == "epd_errors_total" and sample.labels["stage"] == "gateway"
    )


async def left(house: House, **fields: Any) -> None:
    """Go away after the first words, or at once."""
    connection = await Connection.send(house.http, "POST", CHAT, raw(**fields))
    if fields.get("stream"):
        await connection.head()
        await anext(connection.events())
    else:
        await until(lambda: house.gateway.service.inflight)
    connection.close()
    await house.settled()


async def over_grpc(house: House, request: Any, leave: bool = False) -> None:
    async with grpc.aio.insecure_channel(house.grpc) as channel:
        call = gateway_pb2_grpc.GatewayStub(channel).Chat(request)
        try:
            async for _ in call:
                if leave:
                    call.cancel()
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            pass
    await house.settled()


async def not_to_the_end(call: Call) -> None:
    if call.token >= 3:
        await hang(call)


async def test_ops_07_every_request_is_counted_once_however_it_ends(house: House) -> None:
    before, sent = ended(), Counter[str]()
    for stream in (False, True):
        for _ in range(3):
            assert (await house.chat(stream=stream)).status == 200
            assert (await house.chat(stream=stream, temperature="hot")).status == 400
        sent += Counter(ok=3, refused=3)
    assert (await post(house.http, CHAT, b"{")).status == 400
    assert (await house.chat(model="other")).status == 400
    assert (await post(house.http, "/v1/completions", {"prompt": "a", "n": -1})).status == 400
    await over_grpc(house, ask())
    await over_grpc(house, ask("a" * 10_000))
    sent += Counter(ok=1, refused=4)
    house.script.hooks["decode.token"] = not_to_the_end
    await left(house, stream=True)
    await left(house)
    await over_grpc(house, ask(), leave=True)
    sent += Counter(cancelled=3)
    house.script.hooks["decode.token"] = fail(ErrorKind.INTERNAL)
    await house.chat(stream=True)
    await house.chat()
    await over_grpc(house, ask())
    house.script.hooks = {"prefill.job": fail(ErrorKind.STAGE_UNAVAILABLE)}
    assert (await house.chat()).status == 503
    house.script.hooks = {"prefill.job": fail(ErrorKind.OVERLOADED)}
    assert (await house.chat()).status == 429
    sent += Counter(failed=4, refused=1)
    await house.settled()
    assert ended() - before == sent


FORMS: dict[str, tuple[type, dict[str, Any]]] = {
    "chat/completions": (Encoder, {"messages": [{"role": "user", "content": "a"}]}),
    "completions": (CompletionEncoder, {"prompt": "a"}),
    "responses": (ResponseEncoder, {"input": "a"}),
}


@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize(
    ("broken", "stream"),
    [("last", True), ("whole", False), ("__init__", True), ("__init__", False)],
)
async def test_ops_07_an_answer_that_breaks_at_its_end_has_failed(
    house: House, monkeypatch: pytest.MonkeyPatch, path: str, broken: str, stream: bool
) -> None:
    """All tokens were made, and none of that is a success until it was handed over."""

    def breaks(*_: Any) -> bytes:
        raise ZeroDivisionError

    form, asked = FORMS[path]
    before, told = ended(), errors()
    monkeypatch.setattr(form, broken, breaks)
    reply = await post(house.http, f"/v1/{path}", {"model": "demo", "stream": stream, **asked})
    assert (reply.status == 200) is (broken == "last")
    assert b"internal error" in reply.body
    await house.settled()
    assert (ended() - before, errors() - told) == (Counter(failed=1), 1)


async def test_ops_07_a_call_that_breaks_at_its_end_has_failed(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr("gateway.grpc_api._finished", breaks)
    before = ended()
    await over_grpc(house, ask())
    assert ended() - before == Counter(failed=1)


async def test_ops_07_who_leaves_before_the_last_words_has_left(house: House) -> None:
    """The output is complete, and its end was never taken."""
    service, before = house.gateway.service, ended()
    call = parse_body(raw(), service.config.limits, 1024)
    answer = await service.open(call, "id", service.budget.hold())
    parts = answer.parts()
    while answer.reason is None:
        await anext(parts)
    assert service.inflight == 0, "its place is free before its last words are sent"
    assert ended() == before
    answer.cancel()
    answer.finish()
    assert ended() - before == Counter(cancelled=1)


async def test_ops_07_calls_that_may_not_be_or_say_nothing_are_refused(house: House) -> None:
    before = ended()
    async with grpc.aio.insecure_channel(house.grpc) as channel:
        for method in ("Chat", "Complete", "ListModels"):
            start: Any = channel.stream_stream(f"/epd.v1.Gateway/{method}")
            call = start()
            await call.write(b"\xff" * 50)
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert ended() - before == Counter(refused=2)


@pytest.mark.parametrize("point", ["prefill.job", "decode.token"])
@pytest.mark.parametrize("stream", [False, True])
async def test_ops_07_an_error_is_counted_once(house: House, point: str, stream: bool) -> None:
    house.script.hooks[point] = fail(ErrorKind.INTERNAL)
    before = errors()
    await house.chat(stream=stream)
    assert errors() - before == 1
    await over_grpc(house, ask())
    # Stages count theirs apart: the scripted ones run in this process under their own names.
    assert errors() - before == 2


async def test_ops_07_other_routes_are_no_requests_for_answers(house: House) -> None:
    before = ended()
    await get(house.http, "/v1/models")
    await get(house.http, "/nothing")
    tokens = await post(house.http, "/tokenize", {"model": "demo", "prompt": "a"})
    assert tokens.status in (200, 400)
    assert ended() == before


# -- every counter ---------------------------------------------------------------------


def total(name: str) -> float:
    """A counter of this process, over its labels."""
    return sum(
        sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == name
    )


async def decode_and_be_pushed_out() -> None:
    """Two outputs that both grow into a pool for one."""
    bench = decode_bench.Bench()
    older = await bench.join([20] * 4, max_tokens=50, arrival_ms=1)
    younger = await bench.join([30] * 4, max_tokens=50, arrival_ms=2)
    with pytest.raises(EpdError):
        await decode_bench.drain(younger)
    await decode_bench.drain(older)
    for ticket in (older, younger):
        bench.worker.close(ticket)
    await bench.close()


PROMPTS = [[start + n for n in range(20)] for start in (20, 40, 60, 80)]
"""Four of 5 blocks each, of which the pools of 16 blocks keep three."""


async def decode_more_than_is_kept() -> None:
    bench = decode_bench.Bench()
    for ids in PROMPTS:
        ticket = await bench.join(ids, max_tokens=2)
        await decode_bench.drain(ticket)
        bench.worker.close(ticket)
    await bench.close()


async def prefill_more_than_is_kept() -> None:
    bench = prefill_bench.Bench()
    for ids in PROMPTS:
        ticket = await bench.worker.submit(prefill_job(ids))
        await prefill_bench.until_event(ticket, FirstToken)
        bench.worker.close(ticket, clean=True)
    await bench.close()


async def land_more_than_is_kept() -> None:
    """Two pictures of 640 kB one after the other in 1 MiB."""
    rows, bench = 40_000, prefill_bench.Bench(kv__prefill_tokens=1 << 17)
    for name in "ab":
        item = prefill_bench.image(rows, name)
        memory = page_aligned(rows * 16)
        ticket = await bench.worker.submit(prefill_job([20, *[IMAGE] * rows, 21], items=(item,)))
        await prefill_bench.until_event(ticket, Admitted)
        bench.worker.embedding_ready(ticket, 0, prefill_bench.announced(bench, memory, rows=rows))
        await prefill_bench.until_event(ticket, EmbeddingFetched)
        bench.worker.close(ticket, clean=True)
    await bench.close()


async def prefill_and_fail_a_step() -> None:
    bench = prefill_bench.Bench()
    for ids in ([20, 21], [20, POISON]):
        ticket = await bench.worker.submit(prefill_job(ids))
        with suppress(EpdError):
            await prefill_bench.until_event(ticket, FirstToken)
        bench.worker.close(ticket, clean=True)
    await bench.close()


async def encode_more_than_is_kept() -> None:
    bench = test_encode_worker.Bench()
    for picture in (1, 2, 3, 4, 1):
        ticket, _ = await bench.ready(test_encode_worker.job(picture))
        bench.worker.close(ticket, clean=True)
    await bench.close()


async def lose_a_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    async def dies(self: Any, *_: object) -> None:
        raise WorkerDied(timed_out=True)

    monkeypatch.setattr(Sandbox, "run", dies)
    pictures = ImagePreparer(Config())
    with pytest.raises(EpdError):
        await pictures.prepare(test_encode_worker.job(1))


async def fetch_what_is_refused() -> None:
    with pytest.raises(EpdError):
        await Fetcher(FetchConfig()).fetch("http://a.example/x.png", "url")


async def read_from_a_peer_and_from_nobody() -> None:
    owner = PeerProcess(seed=4, nbytes=1 << 16)
    engine, memory = Engine(TransferConfig(), "f00d", epoch=77), Memory(1 << 16)
    try:
        engine.start()
        engine.register(memory.address, memory.nbytes, memory)
        piece = Piece(memory.address, owner.address, 1 << 12)
        await engine.read(owner.peer, "f00d", [piece], memory, 5.0)
        with pytest.raises(EpdError):
            await engine.read(owner.peer, "other weights", [piece], memory, 5.0)
    finally:
        await engine.close()
        owner.kill()


def evicted() -> Counter[str]:
    """Entries that gave way, by cache."""
    found: Counter[str] = Counter()
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            if sample.name == "epd_cache_evictions_total":
                found[sample.labels["cache"]] += int(sample.value)
    return found


@pytest.mark.parametrize(
    ("cache", "fill"),
    [
        ("embedding", encode_more_than_is_kept),
        ("landing", land_more_than_is_kept),
        ("prefill_prefix", prefill_more_than_is_kept),
        ("decode_prefix", decode_more_than_is_kept),
    ],
)
async def test_ops_08_each_caches_evictions_are_counted_as_its_own(
    cache: str, fill: Callable[[], Awaitable[None]]
) -> None:
    before = evicted()
    await fill()
    assert set(evicted() - before) == {cache}


COLOCATED = {"epd_kv_adopted_blocks_total", "epd_transfer_local_bytes_total"}
"""Need two stages in one process: `tests/e2e/test_colocated.py` moves them."""


async def test_ops_08_every_counter_moves(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """All counters that the documentation lists, each by what it counts."""
    names = {name for name, kind, _ in documented() if kind == "counter"} - COLOCATED
    assert all(name in (ROOT / "tests/e2e/test_colocated.py").read_text() for name in COLOCATED)
    before = {name: total(name) for name in names}
    assert (await house.chat()).status == 200
    assert (await house.chat(temperature="hot")).status == 400
    await decode_and_be_pushed_out()
    await prefill_and_fail_a_step()
    await encode_more_than_is_kept()
    await lose_a_decoder(monkeypatch)
    await fetch_what_is_refused()
    await read_from_a_peer_and_from_nobody()
    still = {name for name in names if total(name) == before[name]}
    assert still == set()
