"""Processes that share cores: one forward at a time, first come, first served."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from epd.errors import EpdError
from epd.obs import metrics
from epd.runtime.core_turns import LOOK_S, CoreTurns
from epd.runtime.series import Series
from epd.runtime.steps import EngineThread, StepLoop
from tests.readings import reading
from tests.turn_taker import TurnTaker
from tests.waiting import block_until, soon, until

SHORT_S = 0.05
NEVER_S = 1000.0
"""No test lasts so long: who looks that seldom has to be waked."""


class Host:
    """Any number of processes and one file."""

    def __init__(self, file: Path, stack: ExitStack) -> None:
        self.file = file
        self._stack = stack

    def process(self, longest_s: float = 60.0, look_s: float = LOOK_S) -> TurnTaker:
        return self._stack.enter_context(TurnTaker(self.file, longest_s, look_s))

    def here(self, longest_s: float = 60.0, look_s: float = LOOK_S) -> CoreTurns:
        turns = CoreTurns(str(self.file), "prefill", longest_s, look_s)
        self._stack.callback(turns.close)
        return turns


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with ExitStack() as stack:
        yield Host(tmp_path / "turns", stack)


def test_a_free_turn_is_had_at_once_and_again(host: Host) -> None:
    one = host.process()
    for _ in range(3):
        assert one.do("take") == "taken at once"
        assert one.do("wanted") == "False"
        one.do("give")
    assert one.do("overruns") == "0"


def test_another_waits_until_it_is_given(host: Host) -> None:
    here, other = host.here(), host.process()
    here.take()
    assert not here.contended
    other.tell("take")
    block_until(lambda: here.wanted)
    here.give()
    assert other.hear() == "taken contended"
    assert here.contended, "who gives it knows that somebody waited"


def test_first_come_first_served_also_for_who_had_it_last(host: Host) -> None:
    here, second, third = host.here(), host.process(), host.process()
    here.take()
    second.tell("take")
    block_until(lambda: here.wanted)
    third.tell("take")
    block_until(lambda: here._taken(2))
    here.give()
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(here.take)
        assert second.hear() == "taken contended"
        block_until(lambda: second.do("wanted") == "True")
        second.do("give")
        assert third.hear() == "taken contended"
        assert not again.done()
        third.do("give")
        again.result()
    here.give()


def test_a_dead_process_keeps_no_turn(host: Host) -> None:
    here, other = host.here(), host.process()
    other.do("take")
    other.signal(signal.SIGKILL)
    here.take()
    assert not here.wanted
    here.give()
    again = host.process()
    assert again.do("take") == "taken at once"


def test_a_stopped_process_holds_up_nobody_for_long(host: Host) -> None:
    holder, other = host.process(), host.process(SHORT_S)
    holder.do("take")
    holder.signal(signal.SIGSTOP)
    assert other.do("take") == "taken contended"
    assert other.do("overruns") == "1"
    other.do("give")
    assert other.do("take") == "taken contended", "beside it, without another wait"
    other.do("give")
    assert other.do("overruns") == "2"
    holder.signal(signal.SIGCONT)
    assert holder.do("give") == "given"

    def alone() -> bool:
        taken = other.do("take")
        other.do("give")
        return taken == "taken at once"

    block_until(alone)
    assert other.do("overruns") == "2", "turns are as before"


def test_who_computed_beside_a_long_turn_waits_for_the_next(host: Host) -> None:
    """A process that is always busy would else have no turns any more after one long forward."""
    holder, here = host.process(), host.here(SHORT_S)
    waited = metrics.TURN_WAIT_SECONDS.labels("prefill")
    holder.do("take")
    here.take()
    here.give()
    holder.do("give")
    holder.do("take")
    before = reading(waited)
    here.take()
    assert reading(waited) - before >= SHORT_S


class Clock:
    """What `take` takes for the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("epd.runtime.core_turns.time.monotonic", lambda: self.now)


def test_a_queue_may_take_long_but_no_turn(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three turns of six seconds each are waited for where ten are the most for one; the fourth
    doesn't end."""
    ahead = [host.process() for _ in range(4)]
    here, overruns = host.here(longest_s=10.0), metrics.TURN_OVERRUNS.labels("prefill")
    ahead[0].do("take")
    for place, process in enumerate(ahead[1:], 1):
        process.tell("take")
        block_until(partial(here._taken, place))
    clock, before = Clock(monkeypatch), reading(overruns)
    seen: list[float] = []

    def waits() -> None:
        if here._place > len(ahead):  # it moves up before anything else happens
            return
        seen.append(clock.now)
        clock.now += 6.0
        if len(ahead) > 1:
            ahead.pop(0).do("give")
            assert ahead[0].hear() == "taken contended"

    here.take(waits)
    assert reading(overruns) == before + 1
    assert seen == [0.0, 6.0, 12.0, 18.0, 24.0]


def test_no_two_turns_look_alike_however_short(host: Host) -> None:
    """By the file's time of change those of one tick of the kernel's clock did."""
    here = host.here()
    numbers = []
    for _ in range(100):
        here.take()
        numbers.append(here._latest())
        here.give()
    assert len(set(numbers)) == 100


def test_who_gives_a_turn_wakes_the_next(host: Host) -> None:
    here = host.here()
    others = [host.process(look_s=NEVER_S) for _ in range(2)]
    here.take()
    for place, other in enumerate(others, 1):
        other.tell("take")
        block_until(partial(here._taken, place))
    here.give()
    for other in others:
        assert other.hear() == "taken contended"
        assert other.do("give") == "given"


def test_nobody_who_comes_at_any_moment_is_left_asleep(host: Host) -> None:
    """Three processes at once, hundreds of times, none of which looks by itself."""
    processes = [host.process(look_s=NEVER_S) for _ in range(3)]
    for process in processes:
        process.tell("many")
    assert [process.hear() for process in processes] == ["had"] * 3
    assert [process.do("overruns") for process in processes] == ["0"] * 3


def test_one_that_dies_in_the_queue_holds_up_nobody(host: Host) -> None:
    here, second, third = host.here(), host.process(), host.process()
    here.take()
    second.tell("take")
    block_until(lambda: here._taken(1))
    third.tell("take")
    block_until(lambda: here._taken(2))
    second.signal(signal.SIGKILL)
    block_until(lambda: not here._taken(2) and here.wanted)
    here.give()
    assert third.hear() == "taken contended"


@pytest.mark.parametrize("content", [b"", b"\xff" * 5, b"\xff" * 100])
def test_who_writes_into_the_file_or_cuts_it_short_ends_no_queue(
    host: Host, content: bytes
) -> None:
    here, other = host.here(), host.process()

    def damage() -> None:  # not by this process, whose locks in the file would end
        subprocess.run(
            ["tee", str(host.file)], input=content, stdout=subprocess.DEVNULL, check=True
        )

    for _ in range(3):
        here.take()
        damage()
        other.tell("take")
        block_until(lambda: here.wanted)
        damage()
        here.give()
        assert other.hear() == "taken contended"
        damage()
        other.do("give")
    assert other.do("overruns") == "0"


def test_a_number_that_comes_again_is_another_turn(host: Host) -> None:
    """As it may after somebody has written into the file."""
    holder, here = host.process(), host.here(SHORT_S)
    holder.do("take")
    here.take()
    here.give()
    number = here._latest()
    holder.do("give")
    for _ in range(2):
        here.take()
        here.give()
    subprocess.run(
        ["dd", f"of={host.file}", "conv=notrunc", "status=none"],
        input=(number - 1).to_bytes(8, sys.byteorder),
        check=True,
    )
    holder.do("take")
    assert here._latest() == number
    waited = metrics.TURN_WAIT_SECONDS.labels("prefill")
    before = reading(waited)
    here.take()
    assert reading(waited) - before >= SHORT_S


async def test_a_process_that_ends_waits_for_nobody(host: Host) -> None:
    other, thread = host.process(), _thread(host, look_s=NEVER_S)
    loop = StepLoop("prefill", _no_step, lambda: False, thread)
    other.do("take")
    other.signal(signal.SIGSTOP)
    ran: list[str] = []
    running = asyncio.create_task(loop.run(lambda: ran.append("here"), 1))
    await until(lambda: loop.in_step)
    await until(lambda: thread._turns is not None and thread._turns._place == 1)
    with soon(30.0, "a holder that is stopped"):
        await loop.close()
    with pytest.raises(EpdError, match="the worker stops"):
        await running
    assert ran == []


def test_a_file_that_cant_be_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(EpdError, match="no/turns: No such file") as caught:
        CoreTurns(str(tmp_path / "no" / "turns"), "encode")
    assert caught.value.param == "worker.turns_file"


def test_a_file_that_cant_be_written_is_named() -> None:
    with pytest.raises(EpdError, match=r"worker\.turns_file: /dev/full: "):
        CoreTurns("/dev/full", "encode")


async def test_a_series_of_steps_ends_when_another_process_waits(host: Host) -> None:
    """Else decode, whose steps follow each other, would never let prefill compute."""
    loop, other = StepLoop("decode", _no_step, lambda: False, _thread(host)), host.process()
    began: list[int] = []

    def run(work: Sequence[int], begin: Callable[[], None]) -> Sequence[int]:
        began.append(work[0])
        series.offer([work[0] + 1])
        if work[0] == 2:
            other.tell("take")
            block_until(lambda: loop.wanted)
        return work

    series = Series(loop, run, lambda results, ms: None)
    await series.run([0])
    assert began == [0, 1, 2]
    assert other.hear() == "taken contended"
    assert loop.contended
    assert series.withdraw(), "what was offered is planned anew"
    await loop.close()


async def test_a_step_waits_for_other_processes(host: Host) -> None:
    other, loop = host.process(), StepLoop("prefill", _no_step, lambda: False, _thread(host))
    other.do("take")
    ran: list[str] = []
    running = asyncio.create_task(loop.run(lambda: ran.append("here"), 1))
    await until(lambda: other.do("wanted") == "True")
    assert ran == []
    assert loop.in_step
    other.do("give")
    await running
    assert ran == ["here"]
    assert other.do("take") == "taken at once", "the turn was given back"
    await loop.close()


async def test_waiting_for_another_process_is_no_stall(host: Host) -> None:
    other, thread = host.process(), _thread(host)
    loop = StepLoop("prefill", _no_step, lambda: False, thread)
    other.do("take")
    running = asyncio.create_task(loop.run(lambda: None, 1))
    await until(lambda: other.do("wanted") == "True")
    since = time.monotonic()
    await until(lambda: thread.advanced > since)
    assert not running.done()
    other.do("give")
    await running
    await loop.close()


async def test_a_turn_that_failed_while_it_was_taken_is_given_back(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, loop = host.process(), StepLoop("prefill", _no_step, lambda: False, _thread(host))

    def refuse(file: int, data: bytes, offset: int) -> None:
        raise PermissionError

    with monkeypatch.context() as patched:
        patched.setattr("epd.runtime.core_turns.os.pwrite", refuse)
        with pytest.raises(PermissionError):
            await loop.run(lambda: None, 1)
    assert other.do("take") == "taken at once"
    await loop.close()


def _thread(host: Host, look_s: float = LOOK_S) -> EngineThread:
    return EngineThread("decode", CoreTurns(str(host.file), "decode", 60.0, look_s))


async def _no_step() -> bool:
    return False
