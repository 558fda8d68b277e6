"""Several workers of one process, seen as one."""

from __future__ import annotations

import asyncio
import time

import pytest

from epd.errors import EpdError, ErrorKind
from epd.jobs import Stage
from epd.runtime.group import Description, Load, WorkerGroup
from epd.runtime.steps import EngineThread, StepLoop
from tests.unit.idle_worker import IdleWorker
from tests.waiting import LIMIT_S, until


def three() -> tuple[IdleWorker, IdleWorker, IdleWorker]:
    encode = IdleWorker(Stage.ENCODE, max_rows=100, max_queue=9)
    prefill = IdleWorker(
        Stage.PREFILL, numerics_id="n", kv_layout="l", kv_block_shape=(2,), kv_tokens=64,
        max_context=50, max_rows=80, max_queue=7,
    )  # fmt: skip
    decode = IdleWorker(
        Stage.DECODE, numerics_id="n", kv_layout="l", kv_block_shape=(2,), kv_tokens=64,
        max_context=40, max_queue=8,
    )  # fmt: skip
    return encode, prefill, decode


async def test_gateways_are_told_the_smallest_limit_and_the_whole_load() -> None:
    group = WorkerGroup(three())
    assert group.name == "encode+prefill+decode"
    assert group.describe() == Description(
        epoch=1, fingerprint="f", dtype="float32", numerics_id="n", kv_layout="l",
        kv_block_shape=(2,), kv_tokens=64, max_context=40, max_rows=80, max_queue=7,
    )  # fmt: skip
    assert group.load() == Load(3, 6, 64)


async def test_integrity_is_looked_at_when_all_are_idle() -> None:
    workers = three()
    group = WorkerGroup(workers)
    assert group.observed()["integrity"] == "ok"
    workers[2].intact = False
    assert group.observed()["integrity"] == "broken: leak"
    workers[0].tickets = 1
    state = group.observed()
    assert state["integrity"] == "busy"
    workers[0].tickets = 0
    workers[1].steps.in_step = True
    assert group.observed()["integrity"] == "busy", "blocks of a request that is gone"
    assert state["tasks"] == 3
    assert list(state["stages"]) == ["encode", "prefill", "decode"]  # type: ignore[call-overload]


def refuses(worker: IdleWorker) -> bool:
    try:
        with worker.streams.open():
            return False
    except EpdError as error:
        return error.kind is ErrorKind.NOT_STARTED


async def test_a_draining_process_serves_its_own_requests_to_their_end() -> None:
    """Prefill takes nothing new; what it has may still need encode and decode here."""
    encode, prefill, decode = three()
    group = WorkerGroup([encode, prefill, decode])
    running = prefill.streams.open()
    running.__enter__()
    draining = asyncio.create_task(group.drain(LIMIT_S))
    await until(lambda: refuses(prefill))
    assert not refuses(encode)
    following = decode.streams.open()
    following.__enter__()
    running.__exit__(None, None, None)
    await until(lambda: refuses(encode))
    assert refuses(decode)
    assert not draining.done()
    following.__exit__(None, None, None)
    assert await draining


async def test_what_outlasts_the_grace_is_ended_in_every_stage() -> None:
    workers = three()
    group = WorkerGroup(workers)
    errors: list[EpdError] = []
    with workers[0].streams.open() as first, workers[2].streams.open() as second:
        first.append(errors.append)
        second.append(errors.append)
        assert not await group.drain(0.05)
        await group.end_streams(0.05)
    assert [error.kind for error in errors] == [ErrorKind.STAGE_UNAVAILABLE] * 2
    assert [worker.handed_back for worker in workers] == [1, 1, 1]


async def test_stages_on_one_thread_take_turns_and_wake_each_other() -> None:
    thread = EngineThread("both")
    order: list[str] = []
    left = {"a": 3, "b": 3}

    def loop(name: str) -> StepLoop:
        async def step() -> bool:
            if not left[name]:
                return False
            left[name] -= 1
            await loops[name].run(lambda: order.append(name), 1)
            return True

        return StepLoop(name, step, lambda: left[name] > 0, thread)

    loops = {name: loop(name) for name in left}
    for one in loops.values():
        one.start()
    loops["a"].poke()  # b is woken too: a may have freed what it waits for
    await until(lambda: len(order) >= 6)
    assert order in (["a", "b"] * 3, ["b", "a"] * 3)
    for one in loops.values():
        await one.close()


async def test_a_step_is_timed_without_its_wait_for_the_others() -> None:
    """Else decode's steps would make prefill's tokens look dear, and its chunks shrink."""
    thread = EngineThread("both")

    async def step() -> bool:
        return False

    slow, quick = (StepLoop(name, step, lambda: False, thread) for name in ("slow", "quick"))
    await asyncio.gather(
        slow.run(lambda: time.sleep(2), 1), quick.run(lambda: time.sleep(0.001), 1)
    )
    assert slow.last_ms >= 2000
    assert quick.last_ms < 1000
    for loop in (slow, quick):
        await loop.close()


@pytest.mark.parametrize("stage", [Stage.PREFILL, Stage.DECODE])
async def test_one_stage_alone_shows_its_counts_flat(stage: Stage) -> None:
    assert WorkerGroup([IdleWorker(stage)]).observed() == {
        "tickets": 0, "streams": 0, "tasks": 3, "integrity": "ok",
    }  # fmt: skip
