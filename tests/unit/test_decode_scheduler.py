"""Decode's scheduler against synthetic sequences."""

from __future__ import annotations

import random as random_module

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.scheduler import Scheduler
from epd.errors import EpdError, ErrorKind
from epd.kv.blocks import BlockAllocator

BLOCK = 4


def make(num_blocks: int = 10, max_running: int = 8, max_queue: int = 8) -> Scheduler:
    return Scheduler(BlockAllocator(num_blocks), BLOCK, max_running, max_queue)


def join(scheduler: Scheduler, key: int, kv: int, most: int | None = None) -> None:
    scheduler.admit(key, kv, kv + 8 if most is None else most, arrival=key)


def load(scheduler: Scheduler, *keys: int) -> None:
    for key in keys:
        scheduler.announced(key)
    assert scheduler.reserve() == list(keys)
    for key in keys:
        scheduler.start(key)


def step(scheduler: Scheduler) -> tuple[list[int], list[int]]:
    """(keys that ran, keys that were preempted)."""
    done = scheduler.next_batch()
    scheduler.complete()
    return [slot.key for slot in done.slots], list(done.preempted)


def test_blocks_are_reserved_when_reading_starts_not_when_it_joins() -> None:
    scheduler = make()
    join(scheduler, 0, kv=8)
    assert scheduler.reserve() == []
    scheduler.announced(0)
    assert scheduler.reserve() == [0]
    assert len(scheduler.blocks(0)) == 3  # two for the prompt, one more


def test_a_sequence_runs_only_after_start() -> None:
    scheduler = make()
    join(scheduler, 0, kv=4)
    scheduler.announced(0)
    scheduler.reserve()
    assert step(scheduler) == ([], [])
    assert not scheduler.runnable
    scheduler.start(0)
    assert step(scheduler) == ([0], [])


def test_a_slot_covers_the_new_token_and_grows_by_one_each_step() -> None:
    scheduler = make()
    join(scheduler, 0, kv=7)
    load(scheduler, 0)
    for expected in (8, 9, 10, 11, 12, 13):
        slots = scheduler.next_batch().slots
        assert slots[0].kv_len == expected
        assert len(slots[0].blocks) * BLOCK >= expected
        scheduler.complete()


def test_a_request_that_can_never_fit_is_refused() -> None:
    scheduler = make(num_blocks=3)
    join(scheduler, 0, kv=4, most=12)
    with pytest.raises(EpdError) as caught:
        join(scheduler, 1, kv=4, most=13)
    assert caught.value.kind is ErrorKind.CONTEXT_LENGTH_EXCEEDED


def test_the_largest_request_fits_an_empty_pool() -> None:
    scheduler = make(num_blocks=3)
    join(scheduler, 0, kv=12, most=12)
    load(scheduler, 0)
    scheduler.finish(0)
    join(scheduler, 1, kv=4, most=12)
    load(scheduler, 1)
    for _ in range(8):
        assert step(scheduler) == ([1], [])


def test_a_full_queue_is_refused() -> None:
    scheduler = make(max_queue=1)
    join(scheduler, 0, kv=4)
    with pytest.raises(EpdError) as caught:
        join(scheduler, 1, kv=4)
    assert caught.value.kind is ErrorKind.OVERLOADED


def test_reservation_is_first_come_first_served() -> None:
    scheduler = make(num_blocks=5)
    join(scheduler, 0, kv=12)  # 4 blocks
    join(scheduler, 1, kv=12)
    join(scheduler, 2, kv=1)  # would fit at once
    for key in range(3):
        scheduler.announced(key)
    assert scheduler.reserve() == [0]
    scheduler.finish(0)
    assert scheduler.reserve() == [1]


def test_the_youngest_gives_way_and_the_oldest_goes_on() -> None:
    scheduler = make(num_blocks=6)
    for key in range(3):
        join(scheduler, key, kv=4, most=24)  # 2 blocks each: the pool is full
    load(scheduler, 0, 1, 2)
    for _ in range(4):
        assert step(scheduler) == ([0, 1, 2], [])
    # each needs a third block now
    assert step(scheduler) == ([0, 1], [2])
    for _ in range(3):
        assert step(scheduler) == ([0, 1], [])
    assert step(scheduler) == ([0], [1])


def test_the_youngest_by_arrival_not_by_joining() -> None:
    scheduler = make(num_blocks=4)
    scheduler.admit(0, 4, 16, arrival=2.0)
    scheduler.admit(1, 4, 16, arrival=1.0)  # came again after a preemption
    load(scheduler, 0, 1)
    for _ in range(4):
        step(scheduler)
    assert step(scheduler) == ([1], [0])


def test_a_preempted_reader_keeps_its_blocks_until_its_reads_are_over() -> None:
    scheduler = make(num_blocks=4)
    join(scheduler, 0, kv=4, most=16)
    load(scheduler, 0)
    join(scheduler, 1, kv=1, most=4)
    scheduler.announced(1)
    assert scheduler.reserve() == [1]  # one block; one is spare
    for _ in range(8):
        assert step(scheduler)[0] == [0]
    assert step(scheduler) == ([], [1])  # blocks are on their way: 0 waits
    assert step(scheduler) == ([], [])
    scheduler.start(1)  # too late
    scheduler.release(1)
    assert step(scheduler) == ([0], [])


def test_blocks_of_a_running_step_are_freed_when_it_is_done() -> None:
    blocks = BlockAllocator(10)
    scheduler = Scheduler(blocks, BLOCK, 8, 8)
    join(scheduler, 0, kv=4)
    load(scheduler, 0)
    scheduler.next_batch()
    scheduler.abort(0)
    assert blocks.used == 2
    scheduler.complete()
    assert blocks.used == 0


def test_a_newcomer_leaves_a_block_for_each_running_sequence() -> None:
    scheduler = make(num_blocks=6)
    join(scheduler, 0, kv=4)
    join(scheduler, 1, kv=4)
    load(scheduler, 0, 1)  # 2 blocks each, 2 free
    join(scheduler, 2, kv=1, most=8)
    scheduler.announced(2)
    assert scheduler.reserve() == []
    scheduler.finish(1)
    assert scheduler.reserve() == [2]


def test_no_more_than_max_running_hold_blocks() -> None:
    scheduler = make(max_running=2)
    for key in range(3):
        join(scheduler, key, kv=1)
        scheduler.announced(key)
    assert scheduler.reserve() == [0, 1]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=10),
    st.integers(5, 14),
    st.integers(1, 6),
    st.integers(0, 1 << 30),
)
def test_everyone_finishes_and_no_block_is_lost(
    wanted: list[tuple[int, int]], num_blocks: int, max_running: int, seed: int
) -> None:
    """Preempted ones come again with what they have; the oldest always goes on."""
    random = random_module.Random(seed)
    blocks = BlockAllocator(num_blocks)
    scheduler = Scheduler(blocks, BLOCK, max_running, 100)
    need = {k: kv + out for k, (kv, out) in enumerate(wanted) if kv + out <= num_blocks * BLOCK}
    have = {k: wanted[k][0] for k in need}
    loading: set[int] = set()
    leaving: set[int] = set()

    def come(key: int) -> None:
        scheduler.admit(key, have[key], need[key], arrival=key)
        scheduler.announced(key)

    for key in need:
        come(key)
    unfinished = set(need)
    for _ in range(5000):
        if not unfinished:
            break
        loading |= set(scheduler.reserve())
        for key in sorted(loading):
            if random.random() < 0.5:
                loading.discard(key)
                scheduler.start(key)
        done = scheduler.next_batch()
        ran = [slot.key for slot in done.slots]
        for slot in done.slots:
            assert slot.kv_len == have[slot.key] + 1 <= len(slot.blocks) * BLOCK
        used = [block for slot in done.slots for block in slot.blocks]
        assert len(set(used)) == len(used)
        scheduler.complete()
        for key in done.preempted:
            (leaving if key in loading else set()).add(key)
            if key not in loading:
                come(key)
            loading.discard(key)
        for key in list(leaving):
            if random.random() < 0.5:
                leaving.discard(key)
                scheduler.release(key)
                come(key)
        for key in ran:
            have[key] += 1
            if have[key] == need[key]:
                scheduler.finish(key)
                unfinished.discard(key)
        scheduler.check_integrity()
        blocks.check_integrity()
    assert not unfinished
    assert blocks.used == 0
