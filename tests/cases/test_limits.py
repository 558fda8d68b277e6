"""Cases LIF-05, LIF-06, LIF-10, OPS-02, OPS-10: too much of something, for one or for all."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from epd.errors import EpdError, ErrorKind
from epd.handoff import embedding_contract
from epd.jobs import ImageItem
from epd.kv.pool import KvPool
from epd.models.lm import ForwardBatch
from epd.pages import touched
from epd.transfer.checksum import checksum
from epd.transfer.contract import Handle, Span
from prefill.ticket import Admitted, FirstToken
from tests.cases.pictures import body, file, quad, solid, text
from tests.e2e.cluster import Cluster
from tests.e2e.member import request
from tests.unit import prefill_bench
from tests.unit.fake_stage import IMAGE, FakeLm, FakeMemory, prefill_job
from tests.waiting import LIMIT_S, promised

ROW_BYTES = 4096
ROWS = (1 << 20) // ROW_BYTES
"""What landing memory of 1 MiB holds."""


class Counting(FakeLm):
    """Computes nothing: only how long it takes counts."""

    pause_s = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.spec = replace(self.spec, hidden=ROW_BYTES // 4)

    def forward(self, batch: ForwardBatch, pool: KvPool) -> torch.Tensor:
        time.sleep(self.pause_s)
        logits = torch.zeros(len(batch.select), self.spec.vocab_size)
        logits[:, 50] = 1
        return logits


def bench(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> prefill_bench.Bench:
    monkeypatch.setattr(prefill_bench, "FakeLm", Counting)
    large = {"kv__prefill_tokens": 4 * ROWS, "prefill__landing_mib": 1}
    return prefill_bench.Bench(**large | settings)


def items_of(rows: list[int], number: int) -> tuple[ImageItem, ...]:
    return tuple(
        ImageItem(i, bytes([number, i]) * 16, count, (), 8, 8, len(rows))
        for i, count in enumerate(rows)
    )


def announced(worker: prefill_bench.Bench, memory: Any, rows: int) -> Handle:
    nbytes = rows * ROW_BYTES
    span = Span(memory.data_ptr(), nbytes, checksum(memory[:nbytes]))
    return Handle(FakeMemory.peer, embedding_contract(worker.lm.spec, rows, 5), (span,), 1000)


async def serve(worker: prefill_bench.Bench, rows: list[int], number: int, memory: Any) -> None:
    """One request from submit to close, its pictures announced once it is admitted."""
    ids = [20, *[IMAGE] * sum(rows), 21]
    ticket = await worker.worker.submit(prefill_job(ids, items=items_of(rows, number)))
    over = False
    while not over:
        for event in await ticket.events.take():
            if isinstance(event, Admitted):
                for index in event.missing_items:
                    handle = announced(worker, memory, rows[index])
                    worker.worker.embedding_ready(ticket, index, handle)
            over |= isinstance(event, FirstToken)
    worker.worker.close(ticket, clean=True)


async def test_lif_05_requests_that_wait_hold_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places for two pictures and a half, thirty requests of one or two: all are answered."""
    chance = random.Random(5)
    made, memory = bench(monkeypatch), touched(1 << 20)
    size = ROWS * 2 // 5
    wanted = [[size - chance.randrange(8)] * chance.choice([1, 1, 2]) for _ in range(30)]
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(
            *(serve(made, rows, number, memory) for number, rows in enumerate(wanted))
        )
    await made.close()


@pytest.mark.parametrize("rows", [[ROWS], [ROWS // 2, ROWS // 2], [ROWS // 4] * 4])
async def test_lif_06_what_fills_the_memory_exactly_is_served(
    monkeypatch: pytest.MonkeyPatch, rows: list[int]
) -> None:
    made = bench(monkeypatch)
    assert made.worker.describe().max_rows == ROWS
    async with asyncio.timeout(LIMIT_S):
        await serve(made, rows, 1, touched(1 << 20))
    await made.close()


@pytest.mark.parametrize("rows", [[ROWS + 1], [ROWS // 2, ROWS // 2 + 1], [ROWS, 1]])
async def test_lif_06_a_row_more_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, rows: list[int]
) -> None:
    made = bench(monkeypatch)
    ids = [20, *[IMAGE] * sum(rows)]
    with pytest.raises(EpdError, match=r"prefill\.landing_mib") as caught:
        await made.worker.submit(prefill_job(ids, items=items_of(rows, 1)))
    assert caught.value.kind is ErrorKind.IMAGE_TOO_LARGE
    assert caught.value.mapping.http_status == 400
    await made.close()


async def test_ops_02_a_long_prompt_is_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds of steps of 200 ms: no moment looks stalled, and the loop stays free."""
    monkeypatch.setattr(Counting, "pause_s", 0.2)
    made = bench(monkeypatch, prefill__step_tokens=16, prefill__chunk_tokens=16)
    ticket = await made.worker.submit(prefill_job([20] * 16 * 10))
    stalls: list[float] = []
    late: list[float] = []
    whole = asyncio.create_task(prefill_bench.until_event(ticket, FirstToken))
    while not whole.done():
        before = time.monotonic()
        await asyncio.sleep(0.01)
        late.append(time.monotonic() - before - 0.01)
        stalls.append(made.worker.steps.stalled_for())
    assert len(stalls) > 20
    # Each step is progress, however long all of them take.
    assert sum(later < earlier for earlier, later in pairwise(stalls)) >= 3
    assert max(stalls) < promised(1.5)
    assert sorted(late)[len(late) // 2] < 0.1
    made.worker.close(ticket, clean=True)
    await made.close()


def test_ops_02_ready_all_through_a_long_prompt(tight: Cluster) -> None:
    model = tight.model
    long = body(text("red " * 350), max_tokens=8) | {"model": model}
    with ThreadPoolExecutor(8) as pool:
        path = "/v1/chat/completions"
        asked = [pool.submit(request, tight.address, path, long) for _ in range(8)]
        answers = []
        while not all(one.done() for one in asked):
            answers.append(request(tight.address, "/ready").status)
            time.sleep(0.02)
    assert set(answers) == {200}
    assert {one.result().status for one in asked} == {200}


def test_ops_10_long_prompts_hold_up_nobody_else(tight: Cluster) -> None:
    """Prompts of a megabyte, more at once than there are places: most are refused for their
    length, some for the want of a place, and the event loop has time for others."""
    model, path = tight.model, "/v1/chat/completions"
    long = body(text("what is this? " * 70_000), max_tokens=8) | {"model": model}
    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(request, tight.address, path, long) for _ in range(64)]
        waits = []
        while not all(one.done() for one in asked):
            waits.append(request(tight.address, "/health").seconds)
            time.sleep(0.05)
    outcomes = Counter(one.result().status for one in asked)
    assert set(outcomes) <= {400, 429}, outcomes
    assert outcomes[400]
    assert sorted(waits)[len(waits) // 2] < promised(0.5)
    assert tight.chat(body(text("hello"))).status == 200


BAD = {
    "empty": b"",
    "text": b"Hello World",
    "cut": file(quad())[:-60],
    "half": file(quad(), "JPEG")[:400],
    "header only": file(quad())[:33],
}


@pytest.mark.parametrize("name", BAD)
def test_lif_10_after_a_bad_picture_the_good_ones_are_good(cluster: Cluster, name: str) -> None:
    """Alone and beside it, three rounds; the bad one is refused each time."""
    good = body(file(solid("red")), text("What colour?"))
    model, path = cluster.model, "/v1/chat/completions"
    expected = cluster.chat(good).text
    for _ in range(3):
        bad = body(BAD[name], text("What colour?"))
        with ThreadPoolExecutor(4) as pool:
            bodies = [{"model": model} | one for one in (bad, good, bad, good)]
            asked = [pool.submit(request, cluster.address, path, one) for one in bodies]
            replies = [one.result() for one in asked]
        assert [reply.status for reply in replies] == [400, 200, 400, 200]
        for reply in (replies[1], replies[3], cluster.chat(good)):
            assert reply.text == expected
