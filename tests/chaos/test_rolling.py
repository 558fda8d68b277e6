"""Two gateways and two workers of each stage, replaced one after the other under load: no
request is lost; a gateway that dies takes only its own requests with it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from epd.forkserver import Process
from tests.chaos.next_release import VERSION
from tests.chaos.outcomes import Outcome
from tests.chaos.questions import Answer, Question, questions
from tests.chaos.service import Place, Service
from tests.chaos.traffic import Traffic
from tests.e2e.cluster import STAGES
from tests.e2e.forks import start
from tests.waiting import LIMIT_S, block_until, promised, until

pytestmark = pytest.mark.timeout(400)
STAYING = ("whole", "stream", "grpc")
"""Ways of clients that wait for their answer."""
FREED_WITHIN_S = 1.0
"""Beside the running step."""
STEP_S = 1.0
"""That a step may take on a crowded machine."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("rolling"), workers=2)
    try:
        yield service.start()
    finally:
        left = service.close()
    assert not left


@pytest.fixture
def service(running: Service) -> Service:
    """Each test finds it whole."""
    running.make_whole()
    return running


@pytest.fixture(scope="module")
def answers(running: Service) -> Mapping[str, Answer]:
    """To each question, before anything happened."""
    traffic = Traffic(running.gateways, questions(), seed=3)
    asyncio.run(traffic.learn())
    return traffic.expected


@pytest.fixture
def traffic(service: Service, answers: Mapping[str, Answer]) -> Traffic:
    found = Traffic(service.gateways, questions(), seed=3)
    found.expected |= answers
    return found


def not_right(traffic: Traffic) -> list[Outcome]:
    return [outcome for outcome in traffic.outcomes.all if outcome.kind != "right"]


async def test_a_rolling_restart_of_every_worker_loses_no_request(
    service: Service, traffic: Traffic
) -> None:
    clients = asyncio.create_task(traffic.run(3, ways=STAYING, bursts=False))
    for place in service.workers:
        await replace(service, place)
        await another(traffic)
    traffic.stop()
    await clients
    assert not not_right(traffic)
    assert not await asyncio.to_thread(service.leaks)


async def another(traffic: Traffic) -> None:
    """Until one more is answered."""
    before = len(traffic.outcomes.all)
    await until(lambda: len(traffic.outcomes.all) > before)


async def replace(service: Service, place: Place) -> None:
    """As a rolling upgrade does: SIGTERM, its grace, and a new one."""
    place.worker.send(signal.SIGTERM)
    assert await asyncio.to_thread(place.worker.finish) == 0, place.name
    await again(service, place)


async def again(service: Service, place: Place) -> None:
    await asyncio.to_thread(service.again, place)
    await asyncio.to_thread(service.until_complete)


@pytest.mark.parametrize("stage", STAGES)
async def test_a_worker_of_another_release_gets_no_work(
    service: Service, traffic: Traffic, tmp_path: Path, stage: str
) -> None:
    """The old ones go on; the new one says why it isn't wanted."""
    log = tmp_path / "log"
    with upgraded(service.of(stage)[0], log) as process:
        await asyncio.to_thread(block_until, lambda: VERSION in log.read_text())
        assert process.poll() is None, "it goes on dialling: its own gateways may come"
        refusal = next(line for line in log.read_text().splitlines() if VERSION in line)
        assert "version" in refusal
        async with traffic.session() as session:
            for gateway in service.gateways:
                asked = questions()[-1]
                outcome = await traffic.ask(session, gateway, asked, "whole")
                assert outcome.kind == "right", outcome
        service.until_complete()  # as many as there were


@contextlib.contextmanager
def upgraded(place: Place, log: Path) -> Iterator[Process]:
    """Another worker like this one, of a release to come."""
    line = place.worker.line
    line[line.index("epd.cli")] = "tests.chaos.next_release"
    with log.open("w") as out:
        process, _ = start(line, place.worker.environ, out.fileno())
    try:
        yield process
    finally:
        process.terminate()
        process.wait(LIMIT_S)


LONG = Question("long", ("Tell me everything.",), {"max_tokens": 700, "ignore_eos": True})


async def test_a_gateway_that_dies_takes_only_its_own_requests_along(
    service: Service, traffic: Traffic
) -> None:
    dying, staying = service.gateways
    others = Traffic([staying], questions(), seed=4)
    others.expected = traffic.expected
    clients = asyncio.create_task(others.run(2, ways=STAYING, bursts=False))
    traffic.expected[LONG.name] = (("", ""),)  # nobody will see its end
    async with traffic.session() as session:
        lost = [asyncio.create_task(traffic.ask(session, dying, LONG, "stream")) for _ in range(6)]
        await asyncio.to_thread(block_until, lambda: busy(service) >= 2)
        dying.hurt.append((time.monotonic(), float("inf")))
        await asyncio.to_thread(dying.worker.end, signal.SIGKILL)
        await asyncio.gather(*lost)
    await asyncio.sleep(1.0)
    others.stop()
    await clients
    assert others.outcomes.counts["right"] > 0
    assert not not_right(others)
    await again(service, dying)
    assert not await traffic.check_all()
    assert not await asyncio.to_thread(service.leaks)


def busy(service: Service) -> int:
    """Sequences that decode works on."""
    return sum(int(place.worker.debug_state()["running"]) for place in service.of("decode"))


async def test_what_a_dead_gateway_held_is_free_at_once(service: Service, traffic: Traffic) -> None:
    """Alone, so that whatever is held is the dead one's. What was announced may still be
    read by somebody, and waits out its quarantine."""
    dying, _ = service.gateways
    traffic.expected[LONG.name] = (("", ""),)
    async with traffic.session() as session:
        lost = [asyncio.create_task(traffic.ask(session, dying, LONG, "stream")) for _ in range(6)]
        await asyncio.to_thread(block_until, lambda: busy(service) >= 2)
        dying.hurt.append((time.monotonic(), float("inf")))
        await asyncio.to_thread(dying.worker.end, signal.SIGKILL)
        await asyncio.to_thread(
            block_until, lambda: not held(service), promised(FREED_WITHIN_S + STEP_S)
        )
        await asyncio.gather(*lost)
    await again(service, dying)
    assert not await asyncio.to_thread(service.leaks)


def held(service: Service) -> dict[str, int]:
    """Counts that should be 0 although a reader was lost."""
    found: dict[str, int] = {}
    for place in service.workers:
        state = place.worker.debug_state()
        keys = ["streams", "running", "waiting", "tickets"]
        keys += ["kv_blocks_used"] if place.worker.role == "decode" else []
        found |= {f"{place.name}: {key}": int(state[key]) for key in keys if state[key]}
    return found
