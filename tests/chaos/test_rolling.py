"""Two gateways and two workers of each stage, replaced one after the other under load: no
request is lost."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from tests.chaos.outcomes import Outcome
from tests.chaos.questions import questions
from tests.chaos.service import Place, Service
from tests.chaos.traffic import Traffic

pytestmark = pytest.mark.timeout(400)
STAYING = ("whole", "stream", "grpc")
"""Ways of clients that wait for their answer."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("rolling"), workers=2)
    try:
        yield service.start()
    finally:
        left = service.close()
    assert not left


@pytest.fixture
async def traffic(service: Service) -> Traffic:
    found = Traffic(service.gateways, questions(), seed=3)
    await found.learn()
    return found


def not_right(traffic: Traffic) -> list[Outcome]:
    return [outcome for outcome in traffic.outcomes.all if outcome.kind != "right"]


async def test_a_rolling_restart_of_every_worker_loses_no_request(
    service: Service, traffic: Traffic
) -> None:
    clients = asyncio.create_task(traffic.run(3, ways=STAYING, bursts=False))
    for place in service.workers:
        before = len(traffic.outcomes.all)
        await replace(service, place)
        assert len(traffic.outcomes.all) > before, f"nothing was answered around {place.name}"
    traffic.stop()
    await clients
    assert not not_right(traffic)
    assert not await asyncio.to_thread(service.leaks)


async def replace(service: Service, place: Place) -> None:
    """As a rolling upgrade does: SIGTERM, its grace, and a new one."""
    place.worker.send(signal.SIGTERM)
    assert await asyncio.to_thread(place.worker.finish) == 0, place.name
    await again(service, place)


async def again(service: Service, place: Place) -> None:
    """Started by this thread: a child dies with the thread that began it, and those of an
    event loop end with the test."""
    place.worker.launch()
    await asyncio.to_thread(place.worker.until_ready)
    await asyncio.to_thread(service.until_complete)
