"""Driver against a Mooncake that does what the test says, when it says it."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import time
import weakref
from collections.abc import AsyncIterator

import pytest

from epd.transfer.driver import Driver, ReadFailed
from epd.transfer.flow import WINDOW
from epd.transfer.pieces import Piece
from epd.transfer.watcher import pause_after
from tests.waiting import LIMIT_S, a_moment, until

DONE, FAILED, WAITING, LATE = 1, -1, 0, -2


class FakeMooncake:
    """Ids wait until the test ends them. Polling a finished id is an error, as it
    is a use after free in the real one."""

    def __init__(self) -> None:
        self.ids = itertools.count(1000)
        self.status: dict[int, int] = {}
        self.names: dict[int, str] = {}
        self.pieces: list[tuple[str, int]] = []
        self.looks = 0
        self.refuse = False
        self.default = WAITING
        self.lock = threading.Event()
        self.lock.set()

    def batch_transfer_async_read(
        self, name: str, local: list[int], remote: list[int], lengths: list[int]
    ) -> int:
        assert self.lock.wait(LIMIT_S)
        assert len(local) == len(remote) == len(lengths) == 1
        if self.refuse:
            return 0
        batch_id = next(self.ids)
        self.status[batch_id] = self.default
        self.names[batch_id] = name
        self.pieces.append((name, local[0]))
        return batch_id

    def transfer_check_status(self, batch_id: int) -> int:
        self.looks += 1
        status = self.status[batch_id]
        if status in (DONE, FAILED):
            del self.status[batch_id]
        return status

    def end(self, status: int, name: str = "") -> None:
        for batch_id in self.status:
            if not name or self.names[batch_id] == name:
                self.status[batch_id] = status


class Owner:
    """Memory that must stay alive."""


def parts(count: int) -> list[Piece]:
    return [Piece(10 * i, 10 * i, 5) for i in range(count)]


@pytest.fixture
def fake() -> FakeMooncake:
    return FakeMooncake()


@pytest.fixture
async def driver(fake: FakeMooncake) -> AsyncIterator[Driver]:
    driver = Driver(fake, late_s=0.2)  # type: ignore[arg-type]
    yield driver
    fake.lock.set()
    fake.default = DONE

    def over() -> bool:
        fake.end(DONE)
        return not driver.outstanding

    await until(over)
    assert await driver.stop(LIMIT_S), "reads left over"
    driver._flow.check_integrity()
    assert fake.status == {}, "an id was never followed to its end"


def start(
    driver: Driver, name: str = "a:1", count: int = 1, **kwargs: object
) -> asyncio.Task[None]:
    owner = kwargs.get("owner", object())
    return asyncio.create_task(driver.run(name, parts(count), owner, kwargs.get("key")))


def is_gone(reference: weakref.ref[Owner]) -> bool:
    gc.collect()  # the traceback of a failure refers to it too
    return reference() is None


async def test_returns_when_every_id_is_done_and_not_before(
    driver: Driver, fake: FakeMooncake
) -> None:
    task = start(driver, count=3)
    await until(lambda: len(fake.status) == 3)
    first, second, third = fake.status
    fake.status[first] = fake.status[second] = DONE
    await a_moment()
    assert not task.done()
    fake.status[third] = DONE
    await asyncio.wait_for(task, LIMIT_S)
    assert driver.outstanding == 0


async def test_more_pieces_than_the_window_all_arrive_in_order(
    driver: Driver, fake: FakeMooncake
) -> None:
    fake.default = DONE
    count = 3 * WINDOW + 7
    await asyncio.wait_for(driver.run("a:1", parts(count), object(), None), LIMIT_S)
    assert fake.pieces == [("a:1", 10 * i) for i in range(count)]


async def test_the_window_bounds_what_mooncake_holds(driver: Driver, fake: FakeMooncake) -> None:
    start(driver, count=3 * WINDOW)
    await until(lambda: len(fake.status) == WINDOW)
    await until(lambda: driver.outstanding == WINDOW)
    await a_moment()
    assert len(fake.status) == WINDOW == driver.outstanding


async def test_a_failed_id_fails_the_read_at_once_and_parks_the_rest(
    driver: Driver, fake: FakeMooncake
) -> None:
    owner = Owner()
    pinned = weakref.ref(owner)
    task = start(driver, count=3, owner=owner, key="k")
    del owner
    await until(lambda: len(fake.status) == 3)
    fake.status[next(iter(fake.status))] = FAILED
    with pytest.raises(ReadFailed, match="failed read"):
        await asyncio.wait_for(task, LIMIT_S)
    del task
    assert driver.parked == 1
    assert pinned() is not None, "memory freed under a running read"
    settled: list[str] = []
    driver.when_settled("k", lambda: settled.append("k"))
    assert not await driver.drain("k", 0.05)
    assert settled == []
    fake.end(DONE)
    assert await driver.drain("k", LIMIT_S)
    assert settled == ["k"]
    assert driver.parked == 0
    await until(lambda: is_gone(pinned))


async def test_cancellation_parks_until_terminal(driver: Driver, fake: FakeMooncake) -> None:
    owner = Owner()
    pinned = weakref.ref(owner)
    task = start(driver, count=2 * WINDOW, owner=owner, key="k")
    del owner
    await until(lambda: len(fake.status) == WINDOW)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    assert driver.parked == 1
    assert pinned() is not None
    fake.end(DONE)
    assert await driver.drain("k", LIMIT_S)
    assert len(fake.pieces) == WINDOW, "submitted more after the cancellation"
    await until(lambda: is_gone(pinned))


async def test_late_is_not_an_end(driver: Driver, fake: FakeMooncake) -> None:
    task = start(driver)
    await until(lambda: fake.status)
    fake.end(LATE)
    await a_moment()
    assert not task.done()
    fake.end(DONE)
    await asyncio.wait_for(task, LIMIT_S)


async def test_a_refused_descriptor_fails_the_read(driver: Driver, fake: FakeMooncake) -> None:
    fake.refuse = True
    with pytest.raises(ReadFailed, match="refused a descriptor"):
        await asyncio.wait_for(driver.run("a:1", parts(3), object(), None), LIMIT_S)
    assert driver.outstanding == driver.parked == 0


async def test_a_peer_that_hangs_does_not_hold_up_another(
    driver: Driver, fake: FakeMooncake
) -> None:
    hung = start(driver, "hung:1", 2 * WINDOW)
    await until(lambda: len(fake.status) == WINDOW)
    healthy = start(driver, "ok:1", 5)
    await until(lambda: len(fake.status) == WINDOW + 5)
    fake.end(DONE, "ok:1")
    await asyncio.wait_for(healthy, LIMIT_S)
    assert not hung.done()


async def test_a_call_that_never_returns_shows_as_stuck_and_the_loop_lives(
    driver: Driver, fake: FakeMooncake
) -> None:
    assert driver.stuck_s == 0
    fake.lock.clear()
    task = start(driver, key="k")
    await until(lambda: driver.stuck_s > 0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not await driver.drain("k", 0.02), "the stuck call may still submit it"
    fake.lock.set()
    fake.default = DONE
    assert await driver.drain("k", LIMIT_S)
    assert driver.stuck_s == 0


async def test_an_id_that_outlives_mooncakes_own_timeouts_shows_as_stuck(
    driver: Driver, fake: FakeMooncake
) -> None:
    start(driver)
    await until(lambda: fake.status)
    since = time.monotonic()
    await until(lambda: driver.stuck_s > 0.05)
    assert driver.stuck_s < time.monotonic() - since, "it was not late from the beginning"


async def test_stopping_gives_up_every_read_and_refuses_new_ones(fake: FakeMooncake) -> None:
    driver = Driver(fake, late_s=1)  # type: ignore[arg-type]
    task = start(driver, count=2)
    await until(lambda: len(fake.status) == 2)
    stopping = asyncio.create_task(driver.stop(LIMIT_S))
    with pytest.raises(ReadFailed, match="closing"):
        await asyncio.wait_for(task, LIMIT_S)
    with pytest.raises(ReadFailed, match="closed"):
        await driver.run("a:1", parts(1), object(), None)
    assert not stopping.done(), "stopped with reads under way"
    fake.end(DONE)
    assert await stopping


async def test_stopping_says_when_mooncake_did_not_let_go(fake: FakeMooncake) -> None:
    driver = Driver(fake, late_s=1)  # type: ignore[arg-type]
    task = start(driver)
    await until(lambda: fake.status)
    assert not await driver.stop(0.05)
    with pytest.raises(ReadFailed):
        await task


async def test_nothing_to_read_is_done_at_once(driver: Driver, fake: FakeMooncake) -> None:
    await driver.run("a:1", [], object(), None)
    assert fake.pieces == []


def test_pauses_grow_to_a_bound_however_long_nothing_happens() -> None:
    pauses = [pause_after(ms / 1e3) for ms in (0, 0.2, 0.6, 4, 99, 101, 10**9)]
    assert pauses == [0.0001, 0.0001, 0.00015, 0.0002, 0.0002, 0.002, 0.002]


async def test_a_watcher_that_dies_is_reported_and_shows_as_stuck(
    fake: FakeMooncake, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(fake, late_s=0.1)  # type: ignore[arg-type]
    task = start(driver)
    await until(lambda: fake.status)
    fake.status.clear()  # the fake now raises KeyError
    await until(lambda: "following reads failed" in caplog.text)
    await until(lambda: driver.stuck_s > 0)
    assert not await driver.stop(0.05)
    with pytest.raises(ReadFailed):
        await task


class ReusingMooncake(FakeMooncake):
    """Gives an id away again at once, as the real one does: ids are addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.mutex = threading.Lock()
        self.default = DONE

    def batch_transfer_async_read(
        self, name: str, local: list[int], remote: list[int], lengths: list[int]
    ) -> int:
        time.sleep(0.0003)
        with self.mutex:
            batch_id = next(one for one in itertools.count(1000) if one not in self.status)
            self.status[batch_id] = self.default
        return batch_id

    def transfer_check_status(self, batch_id: int) -> int:
        with self.mutex:
            status = super().transfer_check_status(batch_id)
        time.sleep(0.0005)  # the end is seen, and not told yet
        return status


async def test_an_id_that_is_given_away_again_at_once_is_not_mistaken() -> None:
    fake = ReusingMooncake()
    driver = Driver(fake, late_s=5)  # type: ignore[arg-type]

    reads = (driver.run(f"{n % 9}:1", parts(20 + n), object(), None) for n in range(30))
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*reads)
    assert await driver.stop(LIMIT_S)
    driver._flow.check_integrity()
    assert fake.status == {}


async def test_nobody_looks_while_nothing_is_read(driver: Driver, fake: FakeMooncake) -> None:
    fake.default = DONE
    await driver.run("a:1", parts(3), object(), None)
    looks = fake.looks
    await a_moment()
    assert fake.looks == looks == 3


async def test_a_long_read_is_looked_after_now_and_then(driver: Driver, fake: FakeMooncake) -> None:
    task = start(driver)
    await until(lambda: fake.looks > 10)
    await asyncio.sleep(0.5)  # looks are counted over it
    assert fake.looks < 1500
    fake.end(DONE)
    await asyncio.wait_for(task, LIMIT_S)
