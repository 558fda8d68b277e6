"""Leases: every announced byte is freed exactly once, and never too early."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from epd.errors import EpdError, ErrorKind
from epd.transfer.lease import Lease, LeaseState, LeaseTable

HOLD, CAP = 6.0, 500


class LeaseMachine(RuleBasedStateMachine):
    """Random streams that end well or badly, against a ledger of bytes."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(HOLD, CAP)
        self.now = 0.0
        self.freed: Counter[int] = Counter()
        self.announced: dict[int, Lease] = {}
        self.sizes: dict[int, int] = {}
        self.ends: dict[Lease, float] = {}

    def free(self, token: int) -> None:
        lease = self.announced[token]
        assert self.ends.get(lease, float("inf")) <= self.now, "freed too early"
        self.freed[token] += 1

    def cover(self, lease: Lease, nbytes: int) -> int:
        token = len(self.announced)
        self.announced[token] = lease
        self.sizes[token] = nbytes
        return token

    @rule(target=leases, nbytes=st.integers(1, 200))
    def announce(self, nbytes: int) -> Lease | None:
        token = len(self.announced)
        before = self.table.quarantined_bytes
        try:
            lease = self.table.announce("request", nbytes, lambda: self.free(token))
        except EpdError as error:
            kind = error.kind
            assert kind is ErrorKind.OVERLOADED
            assert before >= CAP
            return None
        assert before < CAP
        assert self.cover(lease, nbytes) == token
        return lease

    @rule(lease=leases, nbytes=st.integers(1, 50))
    def extend(self, lease: Lease | None, nbytes: int) -> None:
        if lease and lease.state is LeaseState.OPEN:
            token = self.cover(lease, nbytes)
            self.table.extend(lease, nbytes, lambda: self.free(token))

    @rule(lease=consumes(leases))
    def release(self, lease: Lease | None) -> None:
        if lease:
            self.ends[lease] = self.now
            self.table.release(lease)

    @rule(lease=consumes(leases))
    def lose(self, lease: Lease | None) -> None:
        if lease:
            self.ends[lease] = self.now + HOLD
            self.table.lost(lease, self.now)

    @rule(seconds=st.floats(0, 4))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        freed = sum(self.freed[t] * self.sizes[t] for t in self.freed)
        reported = self.table.sweep(self.now)
        assert sum(self.freed[t] * self.sizes[t] for t in self.freed) == freed + reported

    @invariant()
    def ledger_agrees(self) -> None:
        self.table.check_integrity()
        open_, waiting = 0, 0
        for token, lease in self.announced.items():
            end = self.ends.get(lease)
            if end is None:
                assert not self.freed[token]
                open_ += self.sizes[token]
            elif lease.state is LeaseState.QUARANTINED:
                assert not self.freed[token]
                waiting += self.sizes[token]
            else:
                assert self.freed[token] == 1
        assert self.table.open_bytes == open_
        assert self.table.quarantined_bytes == waiting

    def teardown(self) -> None:
        for lease in list(self.table._open):
            self.release(lease)
        self.now += HOLD
        self.table.sweep(self.now)
        assert all(self.freed[token] == 1 for token in self.announced)
        assert self.table.open_count == self.table.quarantined_bytes == 0


LeaseMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLeases = LeaseMachine.TestCase


def test_clean_end_frees_at_once_and_lost_contact_waits() -> None:
    table, freed = LeaseTable(HOLD, CAP), []
    clean = table.announce("a", 10, lambda: freed.append("clean"))
    lost = table.announce("b", 10, lambda: freed.append("lost"))
    table.release(clean)
    table.lost(lost, now=100.0)
    assert freed == ["clean"]
    assert table.sweep(105.99) == 0
    assert table.sweep(106.0) == 10
    assert freed == ["clean", "lost"]


def test_over_the_cap_the_bytes_stay_the_callers() -> None:
    table, freed = LeaseTable(HOLD, 10), []
    table.lost(table.announce("a", 10, lambda: None), now=0.0)
    with pytest.raises(EpdError, match="10 bytes wait for lost readers") as refused:
        table.announce("b", 1, lambda: freed.append("b"))
    assert refused.value.kind is ErrorKind.OVERLOADED
    assert refused.value.retry_after_s == HOLD
    table.sweep(HOLD)
    table.announce("b", 1, lambda: freed.append("b"))
    assert freed == []


def test_ending_twice_is_caught() -> None:
    table = LeaseTable(HOLD, CAP)
    lease = table.announce("a", 1, lambda: None)
    table.release(lease)
    with pytest.raises(AssertionError, match="is freed"):
        table.lost(lease, now=0.0)
    with pytest.raises(AssertionError):
        table.extend(lease, 1, lambda: None)


def test_bytes_of_several_leases_are_quarantined_once_and_each_lease_is_freed() -> None:
    table = LeaseTable(HOLD, CAP)
    freed: list[Any] = []
    entry = object()
    leases = [table.announce("r", 100, partial(freed.append, n), shared=entry) for n in range(3)]
    own = table.announce("r", 7, lambda: freed.append(9))
    for now, lease in enumerate(leases[:2]):
        table.lost(lease, float(now))
    table.lost(own, 1.0)
    table.check_integrity()
    assert table.quarantined_bytes == 107
    table.release(leases[2])
    assert freed == [2]
    assert table.sweep(HOLD) == 0, "another lost reader may still read them"
    assert (freed, table.quarantined_bytes) == ([2, 0], 107)
    assert table.sweep(HOLD + 1) == 107
    assert (sorted(freed), table.quarantined_bytes) == ([0, 1, 2, 9], 0)
    table.check_integrity()


def test_a_prefix_under_many_lost_leases_is_quarantined_once_block_by_block() -> None:
    """As prefill leases: blocks of a shared prefix, then each request's own."""
    table = LeaseTable(HOLD, CAP)
    freed: list[Any] = []
    leases = []
    for request in range(3):
        lease = table.announce("r", 10, lambda: freed.append("p0"), shared="p0")
        table.extend(lease, 10, lambda: freed.append("p1"), shared="p1")
        table.extend(lease, 10, partial(freed.append, request), shared=f"own {request}")
        leases.append(lease)
    assert [lease.nbytes for lease in leases] == [30] * 3
    for now, lease in enumerate(leases):
        table.lost(lease, float(now))
        table.check_integrity()
    assert table.quarantined_bytes == 20 + 3 * 10
    assert table.sweep(HOLD) == 10, "its own block; two others may still read the prefix"
    assert freed == [0, "p1", "p0"], "the end of a sequence first"
    assert table.sweep(HOLD + 2) == 40
    assert table.quarantined_bytes == 0
    table.check_integrity()
