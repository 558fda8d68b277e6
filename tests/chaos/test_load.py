"""Many at once, and many that leave: everybody is told, and everything is back."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.soak import SETTINGS, Growth, soak
from tests.e2e.cluster import Cluster
from tests.e2e.conftest import COLOUR, grey_png, user
from tests.e2e.http_client import Reply, post
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.timeout(400)
BURST = 200


async def test_a_short_soak_leaves_nothing(tmp_path: Path) -> None:
    """`make soak` sends 10,000 and measures memory."""
    cluster = Cluster(tmp_path, settings=SETTINGS).start()
    try:
        result = await soak(cluster, requests=300, aborted=0.3, clients=6)
    finally:
        cluster.close()
    assert not result.outcomes.faults, result.text()
    assert not result.left
    counts = result.outcomes.counts
    assert counts["right"] > 150
    assert 40 < counts["aborted"] < 130


@pytest.mark.parametrize("most_waiting", [256, pytest.param(16, marks=pytest.mark.long)])
async def test_a_burst_of_200_pictures_on_one_encoder(tmp_path: Path, most_waiting: int) -> None:
    """All are answered, or told at once to come again; none is left in silence."""
    cluster = Cluster(tmp_path, settings={"encode.max_queue": most_waiting}).start()
    try:
        replies = await asyncio.gather(*(_ask(cluster, number) for number in range(BURST)))
        cluster.assert_clean()
    finally:
        cluster.close()
    statuses = Counter(reply.status for reply in replies)
    assert set(statuses) <= {200, 429}, statuses
    assert statuses.total() == BURST
    assert statuses[200] >= most_waiting // 2
    for reply in replies:
        if reply.status == 429:
            assert int(reply.headers["retry-after"]) >= 1
            assert json.loads(reply.body)["error"]["code"] == "overloaded"


async def test_one_keys_burst_leaves_another_keys_picture_its_turn(tmp_path: Path) -> None:
    """120 large pictures of one key wait at one encoder; another key's comes next, not last."""
    settings = {"gateway.api_keys": "sk-burst,sk-other", "gateway.dead_s": "60"}
    cluster = Cluster(tmp_path, settings=settings).start()
    try:
        with cluster.paused("encode"):  # or it might be too quick for a queue
            burst = [
                asyncio.create_task(_ask(cluster, n, "sk-burst", (2000, 1500))) for n in range(120)
            ]
            await _until_sent(cluster, len(burst))
            other = asyncio.create_task(_ask(cluster, 150, "sk-other"))
            await _until_sent(cluster, len(burst) + 1)
        assert (await other).status == 200
        meanwhile = sum(task.done() for task in burst)
        statuses = Counter(reply.status for reply in await asyncio.gather(*burst))
        cluster.assert_clean()
    finally:
        cluster.close()
    assert statuses == {200: len(burst)}
    assert meanwhile < len(burst) / 2, "its picture waited for most of the burst"


async def _until_sent(cluster: Cluster, count: int) -> None:
    """Until so many requests have a stream to prefill and one to encode."""
    async with asyncio.timeout(LIMIT_S):
        while (await asyncio.to_thread(cluster.gateway.debug_state))["streams"] < 2 * count:
            await asyncio.sleep(0.02)


async def _ask(
    cluster: Cluster, number: int, key: str = "none", size: tuple[int, int] = (64, 96)
) -> Reply:
    picture = grey_png(size[0] + number, size[1], number)
    body = {
        "model": "checkpoint",
        "messages": [user(picture, COLOUR)],
        "temperature": 0,
        "max_tokens": 4,
    }
    async with asyncio.timeout(200):
        path, bearer = "/v1/chat/completions", f"Bearer {key}"
        return await post(cluster.address, path, body, authorization=bearer)


def test_the_slope_of_memory() -> None:
    steady = tuple((number, 100.0 + number % 2) for number in range(0, 10_000, 250))
    assert abs(Growth("x", steady).mib_per_1000) < 0.05
    leaking = tuple((number, 100.0 + number / 500) for number in range(0, 10_000, 250))
    assert Growth("x", leaking).mib_per_1000 == pytest.approx(2.0)
