"""Work in processes that can be killed: what a request does to its own worker stays there."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from typing import Any

import psutil
import pytest

from epd.errors import EpdError, ErrorKind
from epd.sandbox import Sandbox, SandboxLimits, WorkerDied
from tests.waiting import LIMIT_S

ENTRY = "tests.unit.sandbox_works:load"
LIMITS = SandboxLimits(cpu_s=1.0, memory_bytes=64 << 20)
Make = Callable[..., Sandbox]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    made: list[Sandbox] = []

    def build(entry: str = ENTRY, workers: int = 1, **arguments: Any) -> Sandbox:
        made.append(Sandbox(entry, arguments or {"greeting": "hello"}, workers, LIMITS))
        return made[-1]

    yield build
    for sandbox in made:
        sandbox.close()


async def pid_of(sandbox: Sandbox) -> int:
    return int((await sandbox.run({"do": "echo"}, b"")).head["pid"])


def zygotes() -> list[psutil.Process]:
    """Processes that have loaded a work, and fork for it."""
    return [
        child
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and "epd.sandbox_worker" in child.cmdline()
    ]


async def two_pids(sandbox: Sandbox) -> set[int]:
    """Of both workers; one may still be on its way."""
    found: set[int] = set()
    async with asyncio.timeout(LIMIT_S):
        while len(found) < 2:
            found.add(await pid_of(sandbox))
    return found


async def test_a_reply_has_a_head_and_memory(make: Make) -> None:
    sandbox = make(greeting="good day")
    reply = await sandbox.run({"do": "echo"}, b"abc" * 1_000_000)
    assert reply.head["greeting"] == "good day"
    assert bytes(reply.data) == b"abc" * 1_000_000 + b"cba" * 1_000_000
    assert bytes((await sandbox.run({"do": "echo"}, b"")).data) == b""


async def test_one_clients_many_requests_are_not_before_anothers_one(make: Make) -> None:
    sandbox, order = make(), []

    async def ask(client: str) -> None:
        await sandbox.run({"do": "echo"}, b"", client)
        order.append(client)

    await asyncio.gather(*map(ask, ["a"] * 6 + ["b"]))
    assert order.index("b") <= 2


async def test_memory_of_a_reply_lives_as_long_as_it_is_used(make: Make) -> None:
    sandbox = make()
    files = len(os.listdir("/proc/self/fd"))
    first = (await sandbox.run({"do": "echo"}, b"one")).data
    second = (await sandbox.run({"do": "echo"}, b"two")).data
    sandbox.close()
    assert (bytes(first[:3]), bytes(second[:3])) == (b"one", b"two")
    del first, second
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= files, "descriptors are left"


async def test_errors_of_the_work_cost_no_worker(make: Make) -> None:
    sandbox = make()
    pid = await pid_of(sandbox)
    with pytest.raises(EpdError) as caught:
        await sandbox.run({"do": "refuse"}, b"")
    assert (caught.value.kind, caught.value.param) == (ErrorKind.IMAGE_TOO_LARGE, "here")
    with pytest.raises(RuntimeError, match="ZeroDivisionError: by design"):
        await sandbox.run({"do": "raise"}, b"")
    assert await pid_of(sandbox) == pid
    assert sandbox.killed == 0


@pytest.mark.parametrize(
    ("action", "timed_out", "level"),
    [
        ("spin", True, "INFO"),  # what computes too long is what somebody sent
        ("sleep", True, "WARNING"),  # no client can make it wait
        ("crash", False, "WARNING"),
        ("exit", False, "WARNING"),
    ],
)
async def test_a_deadly_request_dies_alone(
    make: Make, caplog: pytest.LogCaptureFixture, action: str, timed_out: bool, level: str
) -> None:
    caplog.set_level("INFO")
    sandbox = make(workers=2)
    await sandbox.start()
    before = await two_pids(sandbox)
    dying = asyncio.create_task(sandbox.run({"do": action}, b""))
    await asyncio.sleep(0)
    await pid_of(sandbox)
    assert not (timed_out and dying.done()), "another request waited for the dying one"
    with pytest.raises(WorkerDied) as caught:
        await dying
    assert caught.value.timed_out is timed_out
    assert await two_pids(sandbox) != before
    assert sandbox.killed == 1
    levels = {one.levelname for one in caplog.records if one.msg == "a sandbox worker died"}
    assert levels == {level}


async def test_a_worker_is_replaced_at_once(make: Make) -> None:
    sandbox = make()
    await pid_of(sandbox)
    with pytest.raises(WorkerDied):
        await sandbox.run({"do": "exit"}, b"")
    (zygote,) = zygotes()
    await pid_of(sandbox)
    assert zygotes() == [zygote], "the work was loaded again instead of forked"


async def test_memory_is_capped(make: Make) -> None:
    sandbox = make()
    await sandbox.run({"do": "allocate", "bytes": 32 << 20}, b"")
    with pytest.raises(RuntimeError, match="MemoryError"):
        await sandbox.run({"do": "allocate", "bytes": 128 << 20}, b"")
    await sandbox.run({"do": "allocate", "bytes": 32 << 20}, b"")


async def test_a_killed_zygote_is_started_again(make: Make) -> None:
    sandbox = make()
    await pid_of(sandbox)
    (zygote,) = zygotes()
    (worker,) = zygote.children()
    zygote.kill()
    psutil.wait_procs([worker], timeout=LIMIT_S)
    assert await pid_of(sandbox) != worker.pid, "an innocent request paid for it"


async def test_a_zygote_that_is_not_needed_is_not_started(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many tests of gateways have it; the first request starts it, or the wish to be warm."""
    monkeypatch.setattr("epd.sandbox.AT_ONCE", False)
    idle, warm, asked = make(), make(), make()
    assert not zygotes()
    await warm.start()
    assert len(zygotes()) == 1
    assert await pid_of(asked)
    assert len(zygotes()) == 2
    idle.close()
    with pytest.raises(EpdError, match="could not be started"):
        await asyncio.to_thread(idle._zygote.fork)
    assert len(zygotes()) == 2


async def test_a_request_survives_a_worker_that_others_kill(make: Make) -> None:
    sandbox = make()
    pid = await pid_of(sandbox)
    nap = asyncio.create_task(sandbox.run({"do": "nap"}, b""))
    await asyncio.sleep(0.1)  # mostly it naps by then; if it doesn't, it had nothing to lose
    os.kill(pid, signal.SIGKILL)
    assert (await nap).head["pid"] != pid
    assert sandbox.killed == 0


async def test_what_can_not_be_loaded_says_why(make: Make) -> None:
    refusing = make("tests.unit.sandbox_works:load_refusing", unused=1)
    with pytest.raises(EpdError, match="could not be started"):
        await refusing.start()  # an argument that it does not take: a fault of ours
    sandbox = Sandbox("tests.unit.sandbox_works:load_refusing", {}, 1, LIMITS)
    with pytest.raises(EpdError, match="there is nothing to load"):
        await sandbox.start()
    sandbox.close()
    dying = Sandbox("tests.unit.sandbox_works:load_dying", {}, 1, LIMITS)
    with pytest.raises(EpdError, match="could not be started"):
        await dying.start()
    dying.close()


def test_no_process_outlives_a_killed_server() -> None:
    code = """
    import asyncio, time
    from epd.sandbox import Sandbox, SandboxLimits

    async def main():
        sandbox = Sandbox("tests.unit.sandbox_works:load", {"greeting": ""}, 2,
                          SandboxLimits(1, 1 << 26))
        await sandbox.start()
        print("ready", flush=True)
        time.sleep(60)

    asyncio.run(main())
    """
    server = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    family = psutil.Process(server.pid).children(recursive=True)
    assert len(family) == 3
    server.send_signal(signal.SIGKILL)
    server.wait()
    _, alive = psutil.wait_procs(family, timeout=LIMIT_S)
    assert not alive
    server.stdout.close()
