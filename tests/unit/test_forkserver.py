"""Processes that are forked are children like any other, and lack nothing but their imports."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from epd.forked import may_fork
from epd.forkserver import ForkFailed, ForkServer, Process
from tests.waiting import LIMIT_S, block_until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def forks() -> Iterator[ForkServer]:
    server = ForkServer(os.environ, None, str(ROOT))
    yield server
    server.close()


def command(*what: str) -> list[str]:
    return [sys.executable, "-m", "tests.unit.forked_works", *what]


class Running:
    """A fork of which a test reads the output."""

    def __init__(self, forks: ForkServer, *what: str, **environ: str) -> None:
        out, err = os.pipe(), os.pipe()
        try:
            self.process = forks.spawn(command(*what), {**os.environ, **environ}, out[1], err[1])
        finally:
            os.close(out[1])
            os.close(err[1])
        self.stdout, self.stderr = os.fdopen(out[0]), os.fdopen(err[0])

    def facts(self) -> dict[str, Any]:
        return dict(json.loads(self.stdout.readline()))


def test_a_fork_is_a_child_like_any_other(forks: ForkServer) -> None:
    running = Running(forks, "say", "two words", WHICH="its own")
    facts = running.facts()
    assert facts["argv"] == ["say", "two words"]
    assert facts["environ"] == "its own"
    assert facts["pid"] == facts["group"] == running.process.pid
    assert facts["parent"] == os.getpid()
    assert facts["seen"] == "two words"
    assert facts["files"] == [0, 1, 2]
    assert facts["signals"] == [True]
    assert running.stderr.read() == "an error\n"
    assert running.process.wait(LIMIT_S) == 3
    assert running.process.poll() == 3
    assert Running(forks, "say").facts()["environ"] == ""


def test_signals_and_time_limits(forks: ForkServer) -> None:
    running = Running(forks, "sleep")
    process = running.process
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)
    process.terminate()
    assert process.wait(LIMIT_S) == -signal.SIGTERM
    process.kill()  # nobody


def test_a_dead_server_takes_nothing_with_it_and_is_replaced(forks: ForkServer) -> None:
    before = Running(forks, "sleep")
    before.stdout.readline()
    first = forks.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    after = Running(forks, "say").facts()
    assert forks.pid != first
    assert after["parent"] == os.getpid()
    assert before.process.poll() is None
    before.process.kill()
    assert before.process.wait(LIMIT_S) == -signal.SIGKILL


def test_a_server_that_can_not_start_is_a_reason(
    forks: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ForkFailed, match="ended before"):
        Running(forks, "say")
    with pytest.raises(ForkFailed, match="ended before"):
        asyncio.run(forks.spawn_soon(command("say"), {}, 1, 2))


def test_orphans_of_a_dead_fork_are_collected(forks: ForkServer) -> None:
    running = Running(forks, "orphan")
    orphan = psutil.Process(int(running.stdout.readline()))
    assert running.process.wait(LIMIT_S) == 0
    assert orphan.ppid() == os.getpid()
    running.process.kill_group()

    def collected() -> bool:
        running.process.collect()
        return not psutil.pid_exists(orphan.pid)

    block_until(collected)


async def test_one_that_nobody_was_told_of_is_ended(forks: ForkServer) -> None:
    read, write = os.pipe()
    asking = asyncio.create_task(forks.spawn_soon(command("sleep"), os.environ, write, 2))
    await asyncio.sleep(0)  # it is on its way
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.to_thread(forks.close)
    os.close(write)
    with open(read) as output:
        await asyncio.wait_for(asyncio.to_thread(output.read), LIMIT_S)  # nobody writes any more


async def test_a_server_that_hangs_is_replaced(
    forks: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    first = await forks.spawn_soon(command("sleep"), os.environ, quiet, quiet)
    hanging = forks.pid
    assert hanging is not None
    os.kill(hanging, signal.SIGSTOP)
    monkeypatch.setattr("epd.forkserver._ANSWER_S", 2.0)
    second = await forks.spawn_soon(command("sleep"), os.environ, quiet, quiet)
    assert forks.pid != hanging
    for process in (first, second):
        assert process.poll() is None
        process.kill()
        assert process.wait(LIMIT_S) == -signal.SIGKILL
    os.close(quiet)


async def test_many_at_once_get_each_its_own(forks: ForkServer) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)

    async def one() -> Process:
        return await forks.spawn_soon(command("sleep"), os.environ, quiet, quiet)

    made = await asyncio.gather(*(one() for _ in range(8)))
    assert len({process.pid for process in made}) == 8
    for process in made:
        process.kill()
        assert process.wait(LIMIT_S) == -signal.SIGKILL
    os.close(quiet)


def test_forks_die_with_a_killed_owner() -> None:
    code = """
    import os, sys, time
    from epd.forkserver import ForkServer
    forks = ForkServer(os.environ, None)
    line = [sys.executable, "-m", "tests.unit.forked_works", "sleep"]
    quiet = os.open(os.devnull, os.O_WRONLY)
    print(*(forks.spawn(line, os.environ, quiet, quiet).pid for _ in range(2)), flush=True)
    time.sleep(60)
    """
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    pids = set(map(int, owner.stdout.readline().split()))
    family = psutil.Process(owner.pid).children(recursive=True)
    assert {process.pid for process in family} > pids
    owner.kill()
    owner.wait()
    _, alive = psutil.wait_procs(family, timeout=LIMIT_S)
    assert not alive
    owner.stdout.close()


def test_imports_are_made_once_and_begin_nothing() -> None:
    """A thread, or a file of an event loop or of gRPC, would be broken in every fork."""
    forks = ForkServer(os.environ, "", str(ROOT))
    try:
        facts = Running(forks, "say").facts()
        assert {"torch", "transformers"} <= set(facts["imported"])
        assert "mooncake" not in facts["imported"]
        assert facts["threads"] == 1
        assert facts["may_fork"]
        assert forks.pid is not None
        server = psutil.Process(forks.pid)
        assert server.num_threads() == 1
        assert server.num_fds() == 4, "standard streams and the owner"
        helped = Running(forks, "helper").facts()
        assert helped["imported"] == facts["imported"]
        assert helped["parent"] != os.getpid()
        assert helped["seen"] == "a helper"
        assert helped["files"][:3] == [0, 1, 2]
        assert len(helped["files"]) == 4, "and what it was given"
    finally:
        forks.close()


def test_who_is_no_fork_may_not_fork() -> None:
    assert not may_fork()
