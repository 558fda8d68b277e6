"""Decode's scheduler against synthetic sequences."""

from __future__ import annotations

import pytest

from decode.scheduler import Scheduler
from epd.errors import EpdError, ErrorKind
from epd.kv.blocks import BlockAllocator
from epd.kv.layout import KvLayout, LayerShape
from epd.kv.prefix import BlockChain, PrefixCache, root_hash

BLOCK = 4
ROOT = root_hash("model", "numerics", KvLayout(BLOCK, "float32", (LayerShape(1, 2, 2),)))


def make(num_blocks: int = 10, max_running: int = 8, max_queue: int = 8) -> Scheduler:
    blocks = BlockAllocator(num_blocks)
    return Scheduler(blocks, PrefixCache(blocks), BLOCK, max_running, max_queue)


def reserve(scheduler: Scheduler) -> list[int]:
    """Who may read now."""
    return [place.key for place in scheduler.reserve()]


def chain(ids: list[int]) -> BlockChain:
    return BlockChain(ROOT, ids, (), image_token_id=9, prompt_length=len(ids), block_tokens=BLOCK)


def join(scheduler: Scheduler, key: int, kv: int, most: int | None = None) -> None:
    scheduler.admit(key, kv, kv + 8 if most is None else most, arrival=key)


def load(scheduler: Scheduler, *keys: int) -> None:
    for key in keys:
        scheduler.announced(key)
    assert reserve(scheduler) == list(keys)
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
    assert reserve(scheduler) == []
    scheduler.announced(0)
    (place,) = scheduler.reserve()
    assert (place.key, len(place.blocks), place.cached) == (0, 3, 0)  # two, and one more


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


def test_the_queue_takes_clients_in_turn() -> None:
    scheduler = make(num_blocks=100, max_running=2, max_queue=20)
    for key in range(5):
        scheduler.admit(key, 4, 8, arrival=key, client=b"flood")
    scheduler.admit(5, 4, 8, arrival=5, client=b"one")
    for key in range(6):
        scheduler.announced(key)
    assert reserve(scheduler) == [0, 5]
    scheduler.finish(1)
    scheduler.finish(0)
    scheduler.finish(5)
    assert reserve(scheduler) == [2, 3]
    scheduler.check_integrity()


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


def test_a_burst_does_not_keep_others_out_of_a_full_queue() -> None:
    """The choices of a few requests fill it, those that wait for prefill among them."""
    scheduler = make(num_blocks=100, max_running=1, max_queue=4)
    for key in range(5):
        assert scheduler.make_room(b"burst", 8) is None
        scheduler.admit(key, 4, 8, arrival=key, client=b"burst")
        if key < 3:
            scheduler.announced(key)
            scheduler.reserve()
    assert scheduler.make_room(b"burst", 8) is None, "nobody gives way to an equal"
    assert scheduler.make_room(b"one", 8) == 4, "the last that came"
    assert scheduler.make_room(b"one", 401) is None, "nobody leaves for who can never fit"
    scheduler.finish(4)
    scheduler.admit(5, 4, 8, arrival=5, client=b"one")
    assert scheduler.make_room(b"two", 8) == 3
    scheduler.finish(3)
    scheduler.admit(6, 4, 8, arrival=6, client=b"two")
    assert scheduler.make_room(b"one", 8) is None, "it would have as many then"
    scheduler.announced(5)
    scheduler.finish(0)
    assert reserve(scheduler) == [5], "whoever was given least is next"
    scheduler.check_integrity()


def test_no_full_queue_refuses_an_answer_that_has_begun() -> None:
    """It counts in none either, and gives its place to nobody."""
    scheduler = make(num_blocks=100, max_queue=2)
    for key in range(2):
        scheduler.admit(key, 4, 8, arrival=key, client=b"flood")
    scheduler.admit(2, 4, 8, arrival=0.5, client=b"flood", resumed=True)
    with pytest.raises(EpdError, match="2 requests wait"):
        scheduler.admit(3, 4, 8, arrival=3, client=b"flood")
    assert scheduler.make_room(b"one", 8) == 1
    scheduler.finish(1)
    scheduler.admit(4, 4, 8, arrival=4, client=b"one")
    assert scheduler.waiting == 3
    scheduler.check_integrity()


def test_reservation_is_first_come_first_served() -> None:
    scheduler = make(num_blocks=5)
    join(scheduler, 0, kv=12)  # 4 blocks
    join(scheduler, 1, kv=12)
    join(scheduler, 2, kv=1)  # would fit at once
    for key in range(3):
        scheduler.announced(key)
    assert reserve(scheduler) == [0]
    scheduler.finish(0)
    assert reserve(scheduler) == [1]


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
    assert reserve(scheduler) == [1]  # one block; one is spare
    for _ in range(8):
        assert step(scheduler)[0] == [0]
    assert step(scheduler) == ([], [1])  # blocks are on their way: 0 waits
    assert step(scheduler) == ([], [])
    scheduler.start(1)  # too late
    scheduler.release(1)
    assert step(scheduler) == ([0], [])


def test_blocks_of_a_running_step_are_freed_when_it_is_done() -> None:
    blocks = BlockAllocator(10)
    scheduler = Scheduler(blocks, PrefixCache(blocks), BLOCK, 8, 8)
    join(scheduler, 0, kv=4)
    load(scheduler, 0)
    scheduler.next_batch()
    scheduler.finish(0)
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
    assert reserve(scheduler) == []
    scheduler.finish(1)
    assert reserve(scheduler) == [2]


def test_no_more_than_max_running_hold_blocks() -> None:
    scheduler = make(max_running=2)
    for key in range(3):
        join(scheduler, key, kv=1)
        scheduler.announced(key)
    assert reserve(scheduler) == [0, 1]


def test_a_cached_prefix_is_shared_and_the_rest_is_fresh() -> None:
    blocks = BlockAllocator(10)
    prefix = PrefixCache(blocks)
    scheduler = Scheduler(blocks, prefix, BLOCK, 8, 8)
    hashes = chain([1] * 8).hashes
    scheduler.admit(0, 9, 16, 0, hashes)
    scheduler.announced(0)
    (first,) = scheduler.reserve()
    prefix.insert(hashes, first.blocks[:2])
    scheduler.admit(1, 9, 16, 1, hashes)
    scheduler.announced(1)
    (second,) = scheduler.reserve()
    assert (first.cached, second.cached) == (0, 2)
    assert second.blocks[:2] == first.blocks[:2]
    assert not set(second.blocks[2:]) & set(first.blocks)
    scheduler.check_integrity()
    scheduler.finish(0)
    assert blocks.used == 4
    scheduler.finish(1)
    assert blocks.used == 0


def test_what_is_cached_gives_way_to_a_growing_sequence() -> None:
    blocks = BlockAllocator(4)
    prefix = PrefixCache(blocks)
    scheduler = Scheduler(blocks, prefix, BLOCK, 8, 8)
    hashes = chain([1] * 8).hashes
    scheduler.admit(0, 8, 8, 0, hashes)
    scheduler.announced(0)
    (place,) = scheduler.reserve()
    prefix.insert(hashes, place.blocks)
    scheduler.finish(0)
    join(scheduler, 1, kv=4, most=16)
    load(scheduler, 1)
    for _ in range(12):
        assert step(scheduler) == ([1], [])
    assert len(prefix) == 0


def test_the_step_behind_the_running_one_is_planned_as_if_nobody_ended() -> None:
    scheduler = make()
    assert scheduler.look_ahead() is None, "nothing runs"
    join(scheduler, 0, kv=7)
    load(scheduler, 0)
    assert [slot.kv_len for slot in scheduler.next_batch().slots] == [8]
    ahead = scheduler.look_ahead()
    assert ahead is not None
    assert [(slot.kv_len, len(slot.blocks)) for slot in ahead.slots] == [(9, 3)]
    assert scheduler.look_ahead() is None, "one at a time"
    assert scheduler.next_batch().slots == ()
    scheduler.complete()
    scheduler.check_integrity()
    assert scheduler.next_batch().slots == (), "it may run already"
    scheduler.complete()
    assert [slot.kv_len for slot in scheduler.next_batch().slots] == [10]


def test_a_plan_that_is_withdrawn_can_be_made_again_with_a_newcomer() -> None:
    scheduler = make()
    join(scheduler, 0, kv=4)
    load(scheduler, 0)
    scheduler.next_batch()
    assert scheduler.look_ahead() is not None
    join(scheduler, 1, kv=1)
    load(scheduler, 1)
    scheduler.withdraw()
    ahead = scheduler.look_ahead()
    assert ahead is not None
    assert [(slot.key, slot.kv_len) for slot in ahead.slots] == [(0, 6), (1, 2)]
    scheduler.check_integrity()


def test_no_step_is_planned_beyond_an_output_s_end() -> None:
    scheduler = make()
    join(scheduler, 0, kv=4, most=5)
    join(scheduler, 1, kv=4, most=6)
    load(scheduler, 0, 1)
    scheduler.next_batch()
    ahead = scheduler.look_ahead()
    assert ahead is not None
    assert [slot.key for slot in ahead.slots] == [1]


def test_a_plan_takes_no_block_from_anybody() -> None:
    scheduler = make(num_blocks=4)
    for key in (0, 1):
        join(scheduler, key, kv=3, most=12)
    load(scheduler, 0, 1)
    for _ in range(4):
        assert step(scheduler) == ([0, 1], [])
    assert len(scheduler.next_batch().slots) == 2
    assert scheduler.look_ahead() is None, "both need a third block, and there is none"
    scheduler.complete()
    assert step(scheduler) == ([0], [1])
