"""What each step of prefill computes, of synthetic requests; test_prefill_queue: who waits."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prefill.scheduler import Chunk, ItemSpan, Scheduler


def always(key: int) -> int:
    """Room for everybody; nothing is cached."""
    return 0


def run(scheduler: Scheduler) -> list[tuple[int, int, int]]:
    """One step: (key, start, end) of its chunks."""
    batch = scheduler.next_batch()
    for chunk in batch:
        scheduler.complete(chunk)
    return [(chunk.key, chunk.start, chunk.end) for chunk in batch]


def test_a_prompt_is_cut_into_chunks_and_leaves_after_the_last() -> None:
    scheduler = Scheduler(step_tokens=100, chunk_tokens=4, max_queue=10)
    scheduler.admit(0, 10)
    scheduler.reserve(always)
    assert [run(scheduler) for _ in range(4)] == [[(0, 0, 4)], [(0, 4, 8)], [(0, 8, 10)], []]
    assert scheduler.running == 0


def test_the_last_chunk_says_so() -> None:
    scheduler = Scheduler(8, 8, 10)
    scheduler.admit(0, 12)
    scheduler.reserve(always)
    first = scheduler.next_batch()
    scheduler.complete(first[0])
    assert first == [Chunk(0, 0, 8, last=False)]
    assert scheduler.next_batch() == [Chunk(0, 8, 12, last=True)]


def test_a_chunk_stops_before_an_image_that_is_not_ready() -> None:
    scheduler = Scheduler(100, 100, 10)
    scheduler.admit(0, 20, [ItemSpan(0, range(3, 6)), ItemSpan(1, range(10, 14))])
    scheduler.reserve(always)
    assert run(scheduler) == [(0, 0, 3)]
    assert not scheduler.runnable
    assert run(scheduler) == []
    scheduler.item_ready(0, 1)  # the second first: no use yet
    assert not scheduler.runnable
    scheduler.item_ready(0, 0)
    assert run(scheduler) == [(0, 3, 20)]


@pytest.mark.parametrize(
    ("computed", "first"),
    [(2, [(0, 2, 3)]), (4, []), (6, [(0, 6, 10)]), (12, []), (14, [(0, 14, 20)])],
    ids=["before", "inside one", "after it", "inside the last", "after all"],
)
def test_a_cached_prefix_needs_only_the_images_behind_it(
    computed: int, first: list[tuple[int, int, int]]
) -> None:
    spans = [ItemSpan(0, range(3, 6)), ItemSpan(1, range(10, 14))]
    assert [span.reaches(computed) for span in spans] == [computed < 6, computed < 14]
    scheduler = Scheduler(100, 100, 10)
    scheduler.admit(0, 20, spans)
    scheduler.reserve(lambda key: computed)
    assert run(scheduler) == first
    for span in spans:
        if span.reaches(computed):
            scheduler.item_ready(0, span.index)
    if scheduler.running:
        run(scheduler)
    assert not scheduler.running


def test_text_and_first_image_run_while_the_third_is_missing() -> None:
    scheduler = Scheduler(100, 100, 10)
    spans = [ItemSpan(i, range(10 * i + 5, 10 * i + 9)) for i in range(3)]
    scheduler.admit(0, 40, spans)
    scheduler.reserve(always)
    scheduler.item_ready(0, 0)
    scheduler.item_ready(0, 1)
    assert run(scheduler) == [(0, 0, 25)]


def test_without_overlap_a_request_waits_for_all_its_images_and_no_other_does() -> None:
    scheduler = Scheduler(100, 8, 10, overlap=False)
    scheduler.admit(0, 20, [ItemSpan(0, range(3, 6)), ItemSpan(1, range(10, 14))])
    scheduler.admit(1, 4)
    scheduler.reserve(always)
    assert run(scheduler) == [(1, 0, 4)]
    scheduler.item_ready(0, 0)
    assert not scheduler.runnable
    assert run(scheduler) == []
    scheduler.item_ready(0, 1)
    assert [run(scheduler) for _ in range(3)] == [[(0, 0, 8)], [(0, 8, 16)], [(0, 16, 20)]]


def test_without_overlap_images_inside_the_cached_prefix_are_not_waited_for() -> None:
    scheduler = Scheduler(100, 100, 10, overlap=False)
    scheduler.admit(0, 20, [ItemSpan(0, range(3, 6)), ItemSpan(1, range(10, 14))])
    scheduler.reserve(lambda key: 8)
    assert run(scheduler) == []
    scheduler.item_ready(0, 1)
    assert run(scheduler) == [(0, 8, 20)]


def test_requests_share_a_step_and_a_long_one_does_not_hold_up_a_short_one() -> None:
    scheduler = Scheduler(step_tokens=10, chunk_tokens=8, max_queue=10)
    scheduler.admit(0, 30)
    scheduler.admit(1, 3)
    scheduler.reserve(always)
    assert run(scheduler) == [(0, 0, 8), (1, 0, 2)]
    assert run(scheduler) == [(1, 2, 3), (0, 8, 16)]


def test_prompts_that_came_together_end_one_after_another() -> None:
    """In turns to the last token, all three would end with the last."""
    scheduler = Scheduler(step_tokens=8, chunk_tokens=8, max_queue=10)
    for key in range(3):
        scheduler.admit(key, 12)
    scheduler.reserve(always)
    assert run(scheduler) == [(0, 0, 8)]
    assert run(scheduler) == [(0, 8, 12), (1, 0, 4)]
    assert run(scheduler) == [(1, 4, 12)]
    assert run(scheduler) == [(2, 0, 8)]
    assert run(scheduler) == [(2, 8, 12)]


def test_a_short_rest_that_waits_for_an_image_keeps_nobody_waiting() -> None:
    scheduler = Scheduler(step_tokens=8, chunk_tokens=8, max_queue=10)
    scheduler.admit(0, 12, [ItemSpan(0, [10])])
    scheduler.admit(1, 20)
    scheduler.admit(2, 20)
    scheduler.reserve(always)
    assert run(scheduler) == [(0, 0, 8)]
    assert run(scheduler) == [(1, 0, 8)]
    scheduler.item_ready(0, 0)
    assert run(scheduler) == [(2, 0, 8)]
    assert run(scheduler) == [(0, 8, 12), (1, 8, 12)]


def test_a_lower_budget_holds_for_one_batch() -> None:
    scheduler = Scheduler(step_tokens=10, chunk_tokens=10, max_queue=10)
    scheduler.admit(0, 30)
    scheduler.admit(1, 30)
    scheduler.reserve(always)
    chunks = scheduler.next_batch(budget=4)
    assert [(chunk.key, chunk.tokens) for chunk in chunks] == [(0, 4)]
    for chunk in chunks:
        scheduler.complete(chunk)
    assert run(scheduler) == [(1, 0, 10)]


def test_who_was_served_goes_to_the_back() -> None:
    scheduler = Scheduler(4, 4, 10)
    for key in range(3):
        scheduler.admit(key, 100)
    scheduler.reserve(always)
    order = [run(scheduler)[0][0] for _ in range(6)]
    assert order == [0, 1, 2, 0, 1, 2]


def test_abort_tells_whether_the_running_step_uses_the_blocks() -> None:
    scheduler = Scheduler(10, 10, 10)
    scheduler.admit(0, 50)
    scheduler.admit(1, 5)
    scheduler.reserve(lambda key: 0 if key == 0 else None)
    chunks = scheduler.next_batch()
    assert scheduler.abort(0)
    assert not scheduler.abort(1)
    scheduler.complete(chunks[0])  # of a request that is gone: nothing happens
    assert scheduler.next_batch() == []


def test_a_request_is_in_one_step_at_most() -> None:
    scheduler = Scheduler(10, 5, 10)
    scheduler.admit(0, 50)
    scheduler.reserve(always)
    assert scheduler.next_batch()
    assert scheduler.next_batch() == []


def test_an_atomic_span_is_never_cut() -> None:
    scheduler = Scheduler(step_tokens=4, chunk_tokens=4, max_queue=10)
    scheduler.admit(0, 20, [ItemSpan(0, range(2, 12))], atomic=[(2, 12)])
    scheduler.reserve(always)
    scheduler.item_ready(0, 0)
    assert run(scheduler) == [(0, 0, 2)]
    assert run(scheduler) == [(0, 2, 12)]
    assert run(scheduler) == [(0, 12, 16)]


def test_a_large_atomic_span_waits_until_it_can_run_alone() -> None:
    scheduler = Scheduler(step_tokens=4, chunk_tokens=4, max_queue=10)
    scheduler.admit(0, 2)
    scheduler.admit(1, 12, atomic=[(0, 12)])
    scheduler.reserve(always)
    assert run(scheduler) == [(0, 0, 2)]
    assert run(scheduler) == [(1, 0, 12)]


requests = st.lists(
    st.tuples(
        st.integers(1, 40),
        st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), max_size=3),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


def spans_of(total: int, pieces: list[tuple[int, int]]) -> list[ItemSpan]:
    spans: list[ItemSpan] = []
    at = 0
    for gap, length in pieces:
        first = at + gap
        if first + length <= total:
            spans.append(ItemSpan(len(spans), range(first, first + length)))
            at = first + length
    return spans


@settings(max_examples=300, deadline=None)
@given(
    requests,
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(0, 40),
    st.randoms(use_true_random=False),
)
def test_every_token_runs_once_in_order_and_never_without_its_image(
    wanted: list[tuple[int, list[tuple[int, int]], bool]],
    step: int,
    chunk: int,
    cached: int,
    random: object,
) -> None:
    scheduler = Scheduler(step, chunk, 100)
    spans, atomic = {}, {}
    for key, (total, pieces, whole) in enumerate(wanted):
        spans[key] = spans_of(total, pieces)
        atomic[key] = [(s.positions[0], s.positions[-1] + 1) for s in spans[key] if whole]
        scheduler.admit(key, total, spans[key], atomic[key])
    done = {key: 0 if atomic[key] else cached % wanted[key][0] for key in spans}
    scheduler.reserve(lambda key: done[key])
    missing = [(k, span.index) for k in spans for span in spans[k] if span.reaches(done[k])]
    random.shuffle(missing)  # type: ignore[attr-defined]
    ready: set[tuple[int, int]] = set()
    while scheduler.running:
        batch = scheduler.next_batch()
        scheduler.check_integrity()
        tokens = sum(c.tokens for c in batch)
        assert tokens <= step or (len(batch) == 1 and atomic[batch[0].key])
        for c in batch:
            assert c.start == done[c.key] < c.end
            for span in spans[c.key]:
                inside = any(c.start <= p < c.end for p in span.positions)
                assert not inside or (c.key, span.index) in ready
            for first, stop in atomic[c.key]:
                assert c.end <= first or c.end >= stop
            done[c.key] = c.end
            scheduler.complete(c)
        if not batch:
            assert missing, "nothing runs although every image is here"
            item = missing.pop()
            ready.add(item)
            scheduler.item_ready(*item)
    assert done == {key: wanted[key][0] for key in done}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 8))
def test_nobody_starves(totals: list[int], step: int) -> None:
    """Every runnable request runs within twice as many steps as there are requests: a step of
    each other, and one in which that ends."""
    scheduler = Scheduler(step, step, 100)
    for key, total in enumerate(totals):
        scheduler.admit(key, total)
    scheduler.reserve(always)
    since = dict.fromkeys(range(len(totals)), 0)
    while scheduler.running:
        ran = {key: end for key, _, end in run(scheduler)}
        for key in list(since):
            since[key] = 0 if key in ran else since[key] + 1
            assert since[key] <= 2 * len(totals)
            if ran.get(key) == totals[key]:
                del since[key]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(30, 400), min_size=1, max_size=6), st.integers(1, 12), st.integers(1, 9)
)
@example([30], 12, 9)
def test_a_short_prompt_waits_for_one_turn_of_the_long_ones(
    longs: list[int], step: int, short: int
) -> None:
    """It comes when they all run. Served goes to the back: it has run once before any of
    them has run twice, but for the last step of one, and those that arrive later don't
    overtake it."""
    scheduler = Scheduler(step, step, 1000)
    for key, total in enumerate(longs):
        scheduler.admit(key, total)
    scheduler.reserve(always)
    run(scheduler)
    newcomer = len(longs)
    scheduler.admit(newcomer, short)
    scheduler.reserve(always)
    turns: dict[int, int] = {}
    ended: set[int] = set()
    for later in range(newcomer + 1, newcomer + 1 + 3 * len(longs)):
        scheduler.admit(later, 400)
        scheduler.reserve(always)
        for key, _, end in run(scheduler):
            turns[key] = turns.get(key, 0) + 1
            if key < newcomer and end == longs[key]:
                ended.add(key)
        if newcomer in turns:
            break
    assert turns[newcomer] == 1
    assert all(turns.get(key, 0) <= 1 + (key in ended) for key in range(len(longs)))
    assert not any(key > newcomer and count > 1 for key, count in turns.items())


def test_the_budget_is_shared_by_as_many_as_fit() -> None:
    """Short prompts ride along with a long one instead of waiting for its end."""
    scheduler = Scheduler(step_tokens=16, chunk_tokens=8, max_queue=10)
    for key, total in enumerate((100, 3, 3, 3)):
        scheduler.admit(key, total)
    scheduler.reserve(always)
    assert run(scheduler) == [(0, 0, 8), (1, 0, 3), (2, 0, 3), (3, 0, 2)]
    assert run(scheduler) == [(3, 2, 3), (0, 8, 16)]


def test_a_client_with_many_requests_leaves_another_its_share() -> None:
    """Of memory, and of every step, by tokens: whatever their prompts' lengths."""
    scheduler = Scheduler(step_tokens=16, chunk_tokens=16, max_queue=100)
    for key in range(20):
        scheduler.admit(key, 160, client=b"flood")
    scheduler.reserve(always)
    for key in range(20, 60):
        scheduler.admit(key, 4, client=b"small")
    scheduler.reserve(always)
    computed = {b"flood": 0, b"small": 0}
    for _ in range(10):
        for key, start, end in run(scheduler):
            computed[b"flood" if key < 20 else b"small"] += end - start
    assert abs(computed[b"flood"] - computed[b"small"]) <= 16
    assert sum(computed.values()) == 160
