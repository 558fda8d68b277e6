"""Large pictures, four a request, sixty clients at once, pools that hold a few of them: all
are answered rightly or told to come again, and everything is back afterwards."""

from __future__ import annotations

import asyncio
import io
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from tests.chaos.questions import Question
from tests.chaos.service import Place
from tests.chaos.traffic import Traffic
from tests.e2e.cluster import Cluster

pytestmark = pytest.mark.timeout(600)
CLIENTS = 60
LEAVING = 0.3
LEFT, MOST_BURSTS = 10, 12
TYPED = {"overloaded", "stage_unavailable"}
LARGEST = (6000, 4000)
"""Pixels: the most that the limits allow."""
COMMON = {"model.exact": "true", "limits.request_deadline_s": "200", "worker.stall_s": "30"}
POOLS = {
    # A request's prompt is about 180 tokens, and its answer 24.
    "key-value blocks": {"kv.prefill_tokens": "416", "kv.decode_tokens": "416"},
    # 56 pictures fill the arena, and so do they each prefill's landing memory.
    "rows": {
        "encode.arena_mib": "1",
        "encode.cache_mib": "0",
        "prefill.landing_mib": "1",
        "prefill.embedding_cache": "false",
        "kv.prefill_tokens": "8192",
        "kv.decode_tokens": "2048",
    },
    "queues": {
        "encode.max_queue": "8",
        "prefill.max_queue": "6",
        "decode.max_queue": "4",
        "kv.prefill_tokens": "1024",
        "kv.decode_tokens": "1024",
    },
}


def grey(size: tuple[int, int], shade: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", size, shade).save(file, "PNG")
    return file.getvalue()


def asked() -> list[Question]:
    """All pictures are scaled to the most rows; in half of the requests one of the four is of
    the largest size."""
    found = []
    for number in range(8):
        size = (1200, 900) if number % 2 else LARGEST
        others = [grey((1000 + 100 * i, 1000), 20 * number + i) for i in range(3)]
        one = grey(size, 10 * number)
        parts = (*others, one) if number % 4 else (one, *others)
        question = Question(f"large {number}", (*parts, "Describe them."), {"max_tokens": 24})
        found.append(question)
    return found


@pytest.mark.parametrize(
    "pools",
    ["key-value blocks", "rows", pytest.param("queues", marks=pytest.mark.long)],
)
async def test_large_pictures_in_small_pools(
    pools: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.chaos.traffic.LIMIT_S", 220.0)
    counts = {"prefill": 2}
    cluster = Cluster(tmp_path, counts=counts, settings=COMMON | POOLS[pools]).start()
    try:
        gateway = Place(cluster.gateway, None)
        questions = asked()
        traffic = Traffic([gateway], questions, seed=8)
        await traffic.learn()
        for number in range(MOST_BURSTS):
            await burst(traffic, gateway, questions)
            # Those that should leave may have had their answers before: then once more. Where
            # queues are short, most are told at once to come again, and nobody leaves.
            if number and (pools == "queues" or traffic.outcomes.counts["aborted"] >= LEFT):
                break
        await asyncio.to_thread(cluster.assert_clean)
        assert not await traffic.check_all()
        await asyncio.to_thread(cluster.assert_clean)
    finally:
        cluster.close()
    counted = traffic.outcomes.counts
    assert set(counted) <= {"right", "aborted"} | TYPED, traffic.outcomes.faults or counted
    assert counted["right"] >= (20 if pools == "queues" else CLIENTS)
    assert pools == "queues" or counted["aborted"] >= LEFT


async def burst(traffic: Traffic, gateway: Place, questions: Sequence[Question]) -> None:
    """All at once; some leave at a random moment."""
    draw = random.Random(3)
    ways = ["whole", "stream", "grpc"]
    async with traffic.session() as session, asyncio.TaskGroup() as tasks:

        async def one(question: Question, how: str, after_s: float) -> None:
            await asyncio.sleep(after_s)
            traffic.outcomes.add(await traffic.ask(session, gateway, question, how))

        for number in range(CLIENTS):
            leaves = number < LEAVING * CLIENTS
            how = draw.choice(["leave", "leave early", "leave early"] if leaves else ways)
            after_s = draw.uniform(0, 1.5 if leaves else 0.5)
            tasks.create_task(one(draw.choice(questions), how, after_s))
