"""Flow: every piece is submitted once, windows hold, nobody starves."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epd.transfer.flow import Flow, Read
from epd.transfer.pieces import Piece


def make_read(name: str = "a:1", pieces: int = 3, key: object = None, base: int = 0) -> Read:
    return Read(name, deque(Piece(base + i, base + i, 1) for i in range(pieces)), object(), key)


def read_piece(number: int) -> Piece:
    """Of `make_read`."""
    return Piece(number, number, 1)


class FlowMachine(RuleBasedStateMachine):
    """Random peers, reads, answers and cancellations; a model of what is where."""

    WINDOW = 4

    def __init__(self) -> None:
        super().__init__()
        self.flow = Flow(self.WINDOW)
        self.reads: list[Read] = []
        self.submitting: list[tuple[Read, Piece]] = []
        self.ids: dict[int, Read] = {}
        self.moved: list[Piece] = []
        self.next_id = 1

    @rule(name=st.sampled_from(["a:1", "b:1"]), pieces=st.integers(1, 7))
    def add(self, name: str, pieces: int) -> None:
        read = make_read(name, pieces, base=100 * len(self.reads))
        self.reads.append(read)
        self.flow.add(read)

    @rule()
    def take(self) -> None:
        taken = self.flow.take()
        self.submitting += taken
        self.moved += [piece for _, piece in taken]
        for name in ("a:1", "b:1"):
            waiting = any(read.todo for read in self.reads if read.name == name)
            if waiting:
                assert self.under_way(name) == self.WINDOW, "a free slot and a waiting piece"

    @precondition(lambda self: self.submitting)
    @rule(accepted=st.booleans())
    def answer(self, accepted: bool) -> None:
        read, _ = self.submitting.pop(0)
        if accepted and not read.stopped:
            self.ids[self.next_id] = read
            self.flow.submitted(read, self.next_id)
            self.next_id += 1
        else:
            self.flow.submitted(read, None)
            assert read.failure

    @precondition(lambda self: self.ids)
    @rule(data=st.data(), ok=st.booleans())
    def finish(self, data: st.DataObject, ok: bool) -> None:
        batch_id = data.draw(st.sampled_from(sorted(self.ids)))
        read = self.ids.pop(batch_id)
        self.flow.finished(read, batch_id, ok)
        assert ok or read.failure

    @precondition(lambda self: self.flow.unsettled)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        read = data.draw(st.sampled_from([r for r in self.reads if not r.settled]))
        self.flow.stop(read, "given up")

    def under_way(self, name: str) -> int:
        submitting = sum(read.name == name for read, _ in self.submitting)
        return submitting + sum(read.name == name for read in self.ids.values())

    @invariant()
    def model_agrees(self) -> None:
        self.flow.check_integrity()
        assert len(self.moved) == len(set(self.moved)), "a piece was submitted twice"
        assert self.flow.outstanding == len(self.submitting) + len(self.ids)
        busy = {read for read, _ in self.submitting} | set(self.ids.values())
        for read in self.reads:
            assert read.settled == (read not in busy and not read.todo)
            assert read in self.flow.all() or read.settled
        assert self.flow.parked == sum(read.stopped for read in busy)

    def teardown(self) -> None:
        """Whatever happened, everything settles and each unharmed read is complete."""
        while self.flow.unsettled:
            self.take()
            while self.submitting:
                self.answer(True)
            for batch_id, read in list(self.ids.items()):
                del self.ids[batch_id]
                self.flow.finished(read, batch_id, ok=True)
        for index, read in enumerate(self.reads):
            moved = [piece for piece in self.moved if piece.local // 100 == index]
            assert read.failure or moved == sorted(moved)
        assert self.flow.outstanding == 0


FlowMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestFlow = FlowMachine.TestCase


def test_a_small_read_passes_a_large_one() -> None:
    flow = Flow(window=4)
    large, small = make_read(pieces=100), make_read(pieces=1)
    flow.add(large)
    flow.add(small)
    assert [read for read, _ in flow.take()] == [large, small, large, large]


def test_a_peer_that_answers_nothing_holds_its_own_window_only() -> None:
    flow = Flow(window=2)
    flow.add(make_read("stopped:1", 10))
    assert len(flow.take()) == 2
    flow.add(make_read("stopped:1", 10))
    healthy = make_read("healthy:1", 2)
    flow.add(healthy)
    assert [read for read, _ in flow.take()] == [healthy, healthy]


def test_a_stopped_read_is_parked_until_its_last_id_ends() -> None:
    flow = Flow(window=2)
    read = make_read(pieces=5, key="request")
    flow.add(read)
    flow.take()
    flow.submitted(read, 11)
    flow.stop(read, "cancelled")
    assert (flow.parked, read.settled, flow.of("request")) == (1, False, [read])
    flow.submitted(read, None)  # the submitting thread saw that it was stopped
    assert not read.settled
    flow.finished(read, 11, ok=True)
    assert (flow.parked, read.settled, flow.of("request")) == (0, True, [])
    assert read.failure == "cancelled"
    assert flow.take() == []


def test_the_first_failure_is_the_one_reported() -> None:
    flow = Flow()
    read = make_read(pieces=2)
    flow.add(read)
    flow.take()
    flow.submitted(read, 1)
    flow.submitted(read, 2)
    flow.finished(read, 1, ok=False)
    flow.stop(read, "given up")
    assert read.failure == "the engine reports a failed read"


def test_an_answer_about_an_unknown_id_is_caught() -> None:
    flow = Flow()
    read = make_read(pieces=1)
    flow.add(read)
    flow.take()
    flow.submitted(read, 1)
    with pytest.raises(KeyError):
        flow.finished(read, 2, ok=True)
