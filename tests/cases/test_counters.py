"""Case OPS-08: each counter moves, by what it counts and by nothing else."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from encode.images import ImagePreparer
from epd.config import Config, FetchConfig, TransferConfig
from epd.errors import EpdError
from epd.pages import touched
from epd.runtime.core_turns import CoreTurns
from epd.sandbox import Sandbox, WorkerDied
from epd.transfer.engine import Engine
from epd.transfer.pieces import Piece
from gateway.fetch.fetcher import Fetcher
from prefill.ticket import Admitted, EmbeddingFetched, FirstToken
from tests.e2e.cluster import ROOT
from tests.e2e.gateway_house import House
from tests.e2e.peer_process import Memory, PeerProcess
from tests.turn_taker import TurnTaker
from tests.unit import decode_bench, prefill_bench, test_encode_worker
from tests.unit.fake_stage import IMAGE, POISON, prefill_job
from tests.unit.test_policy_metrics import documented


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
        memory = touched(rows * 16)
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


def wait_for_a_turn_too_long(file: Path) -> None:
    """Another process computes, and goes on."""
    turns = CoreTurns(str(file), "decode", longest_s=0.0)
    with TurnTaker(file) as other:
        other.do("take")
        turns.take()
    turns.close()


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


async def test_ops_08_every_counter_moves(
    house: House, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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
    await asyncio.to_thread(wait_for_a_turn_too_long, tmp_path / "turns")
    still = {name for name in names if total(name) == before[name]}
    assert still == set()
