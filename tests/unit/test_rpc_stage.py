"""The life of a stage process, in this process, with a worker that does nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from epd.config import Config
from epd.config_sources import load_config
from epd.errors import EpdError, ErrorKind
from epd.jobs import Stage
from epd.runtime import stage as stage_module
from epd.runtime.stage import Part, serve_parts
from tests.unit.idle_worker import IdleWorker
from tests.waiting import LIMIT_S, until

SERVING, NOT_SERVING = 1, 2


@pytest.fixture(autouse=True)
def sigterm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(stage_module, "_WATCH_S", 0.02)
    yield
    signal.signal(signal.SIGTERM, before)


def config(grace_s: float = 1.0, **more: object) -> Config:
    own = {"worker.stall_s": 0.2, "worker.grace_s": grace_s, "worker.wedged_s": 0}
    return load_config(None, own | {f"worker.{key}": value for key, value in more.items()}, {})


@asynccontextmanager
async def running(
    worker: IdleWorker, capsys: pytest.CaptureFixture[str], grace_s: float = 1.0
) -> AsyncIterator[tuple[asyncio.Task[None], str]]:
    serving = asyncio.create_task(
        serve_parts(config(grace_s), [Part(worker, "epd.v1.Decode", lambda server: None, 1 << 20)])
    )
    out = ""
    async with asyncio.timeout(LIMIT_S):
        while "READY" not in (out := out + capsys.readouterr().out):
            await asyncio.sleep(0.01)
    facts = json.loads(out.removeprefix("READY "))
    assert facts["stage"] == "decode"
    assert facts["pid"] == os.getpid()
    try:
        yield serving, facts["address"]
    finally:
        if not serving.done():
            os.kill(os.getpid(), signal.SIGTERM)
            await serving


async def health(address: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service="epd.v1.Decode"))
        return int(answer.status)


async def until_health(address: str, status: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while await health(address) != status:
            await asyncio.sleep(0.02)


async def test_health_means_progress(capsys: pytest.CaptureFixture[str]) -> None:
    worker = IdleWorker(Stage.DECODE)
    async with running(worker, capsys) as (_, address):
        await until_health(address, SERVING)
        worker.busy = True  # work, and no step
        await until_health(address, NOT_SERVING)
        async with asyncio.timeout(LIMIT_S):
            while await health(address) != SERVING:
                await worker.steps.run(lambda: None, 1)
        worker.busy = False
        ticks = worker.ticks
        await until(lambda: worker.ticks > ticks + 10)
        assert await health(address) == SERVING, "without work there is no stall"


async def test_a_worker_does_not_outlive_its_pulse(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(limit_s: float) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(stage_module, "pulse", broken)
    with pytest.raises(ZeroDivisionError):
        async with running(IdleWorker(Stage.DECODE), capsys) as (serving, _):
            await serving


async def test_a_stuck_transfer_engine_is_not_serving_and_then_ends_the_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_module, "_STUCK_EXIT_S", 3)
    worker = IdleWorker(Stage.DECODE)
    async with running(worker, capsys) as (serving, address):
        worker.well = False
        await until_health(address, NOT_SERVING)
        worker.well = True
        await until_health(address, SERVING)
        worker.well = False
        with pytest.raises(EpdError, match="stuck"):
            await asyncio.wait_for(serving, LIMIT_S)
    assert worker.closed


async def test_a_worker_that_reaches_no_peer_gets_no_work_and_is_not_restarted(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(stage_module, "_STUCK_EXIT_S", 0.1)
    worker = IdleWorker(Stage.DECODE)
    async with running(worker, capsys) as (serving, address):
        worker.reaches = False
        with caplog.at_level("ERROR"):
            await until_health(address, NOT_SERVING)
            ticks = worker.ticks
            await until(lambda: worker.ticks > ticks + 10)
        assert not serving.done()
        worker.reaches = True
        await until_health(address, SERVING)
    assert "decode: request-7 waits for godot, 1.5 s old" in caplog.text


async def test_a_bug_in_a_step_ends_the_process_with_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    worker = IdleWorker(Stage.DECODE)
    async with running(worker, capsys) as (serving, _):
        worker.broken = True
        worker.steps.poke()
        with pytest.raises(AssertionError, match="bookkeeping"):
            await asyncio.wait_for(serving, LIMIT_S)
    assert worker.closed


async def test_sigterm_waits_for_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    worker = IdleWorker(Stage.DECODE)
    async with running(worker, capsys, grace_s=LIMIT_S) as (serving, address):
        with worker.streams.open():
            os.kill(os.getpid(), signal.SIGTERM)
            await until_health(address, NOT_SERVING)
            with pytest.raises(EpdError) as caught, worker.streams.open():
                pass
            assert caught.value.kind is ErrorKind.NOT_STARTED
            assert not serving.done()
        await asyncio.wait_for(serving, LIMIT_S)
    assert worker.closed


async def test_what_outlasts_the_grace_is_told_why(capsys: pytest.CaptureFixture[str]) -> None:
    worker = IdleWorker(Stage.DECODE)
    errors: list[EpdError] = []
    async with running(worker, capsys, grace_s=0.1) as (serving, _):
        with worker.streams.open() as fail:
            fail.append(errors.append)
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: errors)
        await asyncio.wait_for(serving, LIMIT_S)
    assert errors[0].kind is ErrorKind.STAGE_UNAVAILABLE
