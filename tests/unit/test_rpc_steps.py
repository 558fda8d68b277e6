"""The engine loop: progress, stalls, failures."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

from epd.obs import metrics
from epd.runtime.steps import EngineThread, StepLoop
from tests.readings import reading
from tests.waiting import a_moment, until

ROOT = Path(__file__).resolve().parents[2]


async def test_steps_run_while_there_is_work_and_wait_for_a_poke() -> None:
    work = [3]
    ran = []

    async def step() -> bool:
        if not work[0]:
            return False
        work[0] -= 1
        ran.append(await loop.run(lambda: threading.current_thread().name, 1))
        return True

    loop = StepLoop("decode", step, lambda: work[0] > 0)
    loop.start()
    await a_moment()
    assert ran == []
    loop.poke()
    await until(lambda: loop.steps == 3)
    assert len(ran) == 3
    assert len(set(ran)) == 1, "one thread does all the tensor work"
    assert ran[0] != threading.current_thread().name
    await loop.close()


async def test_the_event_loop_is_free_during_a_step() -> None:
    async def step() -> bool:
        return False

    loop = StepLoop("decode", step, lambda: False)
    release = threading.Event()
    running = asyncio.create_task(loop.run(release.wait, 1))
    await a_moment()  # or for ever
    assert loop.in_step
    release.set()
    await running
    await loop.close()


async def test_a_stage_with_work_and_no_step_is_stalled_and_one_without_work_is_not() -> None:
    work = [True]

    async def step() -> bool:
        return False

    loop = StepLoop("decode", step, lambda: work[0])
    loop.start()
    await asyncio.sleep(2)  # is measured
    assert loop.stalled_for() > 1.9
    work[0] = False
    assert loop.stalled_for() < 1
    work[0] = True
    await loop.run(lambda: None, 1)
    assert loop.stalled_for() < 1
    await loop.close()


async def test_a_step_that_hangs_is_a_stall_although_nothing_waits() -> None:
    release = threading.Event()

    async def step() -> bool:
        return False

    loop = StepLoop("decode", step, lambda: False)
    running = asyncio.create_task(loop.run(release.wait, 1))
    await asyncio.sleep(0.1)  # is measured
    assert loop.stalled_for() > 0.08
    release.set()
    await running
    await loop.close()


async def test_a_long_step_that_goes_on_is_no_stall_nor_is_one_that_waits_for_it() -> None:
    thread = EngineThread("both")
    layered, release = threading.Event(), threading.Event()

    async def step() -> bool:
        return False

    long, other = (StepLoop(name, step, lambda: False, thread) for name in ("prefill", "decode"))

    def layers() -> None:
        for _ in range(150):
            time.sleep(0.02)
            long.advance()
        layered.set()
        release.wait()

    running = asyncio.create_task(long.run(layers, 1))
    await until(lambda: long.in_step)
    waiting = asyncio.create_task(other.run(lambda: None, 1))
    seen = 0.0
    while not layered.is_set():
        await asyncio.sleep(0.01)
        seen = max(seen, long.stalled_for(), other.stalled_for())
    assert seen < 1.5, "half of what the layers take"
    await asyncio.sleep(0.6)  # is measured
    assert min(long.stalled_for(), other.stalled_for()) > 0.4, "now it hangs"
    release.set()
    await asyncio.gather(running, waiting)
    await long.close()


async def test_a_step_that_raises_is_counted_and_leaves_the_thread_usable() -> None:
    async def step() -> bool:
        return False

    def broken() -> None:
        raise ZeroDivisionError

    loop = StepLoop("decode", step, lambda: False)
    counter = metrics.STEP_FAILURES.labels("decode")
    before = reading(counter)
    with pytest.raises(ZeroDivisionError):
        await loop.run(broken, 1)
    assert reading(counter) == before + 1
    assert await loop.run(lambda: 5, 1) == 5
    await loop.close()


async def test_a_bug_in_the_step_itself_ends_the_task() -> None:
    async def step() -> bool:
        raise AssertionError("bookkeeping")

    loop = StepLoop("decode", step, lambda: True)
    task = loop.start()
    loop.poke()
    with pytest.raises(AssertionError, match="bookkeeping"):
        await task
    await loop.close()


FIRST_STEP = """
import os, torch
from epd.runtime.steps import EngineThread
torch.set_num_threads(2)
a, b = torch.zeros(512, 1024), torch.zeros(2048, 1024)
tasks = lambda: len(os.listdir("/proc/self/task"))
engine = EngineThread("x").executor
before = engine.submit(tasks).result()
engine.submit(torch.nn.functional.linear, a, b).result()
print(tasks() - before)
"""


def test_the_first_step_has_all_threads_whatever_the_environment_was() -> None:
    """In a fork the environment was another one when OpenMP read it."""
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", FIRST_STEP]
    done = subprocess.run(
        command, env=environ, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "1\n", "one thread beside the engine's own"


async def test_a_thread_knows_which_stages_are_busy_and_keeps_no_closed_loop_alive() -> None:
    """Its `advance` is a hook of the model, which may live longer than the workers."""

    class Worker:
        work = True

        def __init__(self, stage: str, thread: EngineThread) -> None:
            self.steps = StepLoop(stage, self.step, lambda: self.work, thread)

        async def step(self) -> bool:
            return False

    thread = EngineThread("both")
    prefill, decode = Worker("prefill", thread), Worker("decode", thread)
    assert prefill.steps.busy("decode")
    assert not prefill.steps.busy("encode")
    decode.work = False
    assert not prefill.steps.busy("decode")
    decode.work = True
    gone = weakref.ref(decode)
    await decode.steps.close()
    del decode
    gc.collect()
    assert gone() is None
    assert not prefill.steps.busy("decode")
    await prefill.steps.close()
