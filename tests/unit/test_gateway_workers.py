"""Who is live, who is chosen, who is refused: registry, router, membership's rules."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from epd import __version__
from epd.config import GatewayConfig
from epd.errors import EpdError, ErrorKind
from epd.jobs import Stage
from gateway import router
from gateway.membership import MembershipService
from gateway.worker import Capacity, Card, release
from gateway.workers import Registry
from protos.epd.v1 import membership_pb2 as pb
from tests.waiting import LIMIT_S


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class Stream:
    stage: Stage = Stage.DECODE
    errors: list[EpdError] = field(default_factory=list)
    recalls: int = 0
    spoken: bool = True

    def lose(self, error: EpdError) -> None:
        self.errors.append(error)

    def recall(self) -> None:
        self.recalls += 1


def card(address: str = "a:1", stage: Stage = Stage.DECODE, **fields: object) -> Card:
    base: dict[str, object] = {
        "address": address,
        "epoch": 1,
        "stages": frozenset({stage}),
        "fingerprint": "f",
        "dtype": "float32",
        "kv_layout": "kv/1",
        "kv_block_shape": (4, 2),
        "version": __version__,
    }
    return Card(**{**base, **fields})  # type: ignore[arg-type]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(clock: Clock) -> Registry:
    return Registry("f", "float32", 2.0, clock)


@pytest.mark.parametrize(
    ("field_", "value"),
    [("fingerprint", "other"), ("dtype", "bfloat16"), ("stages", frozenset()), ("address", "")],
)
def test_a_stranger_is_refused_with_both_values(
    registry: Registry, field_: str, value: Any
) -> None:
    with pytest.raises(EpdError) as caught:
        registry.join(card(**{field_: value}))
    assert caught.value.kind is ErrorKind.CONTRACT_MISMATCH
    if field_ in ("fingerprint", "dtype"):
        assert repr(value) in caught.value.message
        assert repr("f" if field_ == "fingerprint" else "float32") in caught.value.message
    assert registry.workers == []


@pytest.mark.parametrize(
    ("version", "fits"),
    [("0.1.0", True), ("0.1.7", True), ("0.1.0rc1", True), ("0.2.0", False), ("1.1.0", False),
     ("0.0.9", False), ("", False), ("nonsense", False)],
)  # fmt: skip
def test_another_release_is_refused_with_both_versions(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, version: str, fits: bool
) -> None:
    monkeypatch.setattr("gateway.workers.__version__", "0.1.4")
    if fits:
        registry.join(card("p:1", Stage.PREFILL, version=version))
        return
    with pytest.raises(EpdError) as caught:
        registry.join(card("p:1", Stage.PREFILL, version=version))
    assert caught.value.kind is ErrorKind.CONTRACT_MISMATCH
    assert repr(version) in caught.value.message
    assert "0.1.x" in caught.value.message


def test_the_number_of_workers_is_bounded(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.workers.MOST_WORKERS", 2)
    first = registry.join(card("p:1", Stage.PREFILL))
    registry.join(card("p:2", Stage.PREFILL))
    with pytest.raises(EpdError) as caught:
        registry.join(card("p:3", Stage.PREFILL))
    assert caught.value.kind is ErrorKind.OVERLOADED
    registry.join(card("p:1", Stage.PREFILL, epoch=2))  # another life takes the same place
    assert first.gone
    assert len(registry.workers) == 2


@pytest.mark.parametrize(
    ("one", "other", "same"), [("1.2.3", "1.9.0", True), ("1.0", "2.0", False)]
)
def test_after_1_0_minor_versions_understand_each_other(one: str, other: str, same: bool) -> None:
    assert (release(one) == release(other)) is same


@pytest.mark.parametrize("other", [{"kv_layout": "kv/2"}, {"kv_block_shape": (8, 2)}])
def test_prefill_and_decode_must_agree_on_blocks(
    registry: Registry, other: dict[str, object]
) -> None:
    registry.join(card("p:1", Stage.PREFILL))
    with pytest.raises(EpdError, match=next(iter(other))):
        registry.join(card("d:1", Stage.DECODE, **other))
    registry.join(card("e:1", Stage.ENCODE, **other))


@pytest.mark.parametrize("stage", list(Stage))
def test_what_a_leaving_worker_has_not_begun_is_asked_for_another(
    registry: Registry, stage: Stage
) -> None:
    leaving, other = (registry.join(card(a, stage)) for a in ("a:1", "a:2"))
    waiting, last = Stream(stage), Stream(stage)
    leaving.streams.add(waiting)
    other.streams.add(last)
    registry.drain(leaving)
    assert (waiting.recalls, last.recalls) == (1, 0)
    registry.drain(other)
    assert last.recalls == 0, "nobody else is there: it is served, if the grace allows"
    registry.join(card("a:3", stage))
    assert last.recalls == 1, "now there is"
    assert not waiting.errors + last.errors, "the worker says what it has begun"


def test_a_call_without_a_job_never_waits_for_another_worker(registry: Registry) -> None:
    leaving = registry.join(card())
    begun, silent = Stream(), Stream(spoken=False)
    leaving.streams |= {begun, silent}
    registry.drain(leaving)
    assert (begun.recalls, silent.recalls) == (0, 1)


def test_the_only_worker_is_the_only_live_one(registry: Registry) -> None:
    assert registry.only(Stage.DECODE) is None
    one, other = (registry.join(card(a)) for a in ("a:1", "a:2"))
    assert registry.only(Stage.DECODE) is None
    registry.drain(one)
    assert registry.only(Stage.DECODE) is other
    assert registry.only(Stage.PREFILL) is None


def test_operators_see_how_long_a_leaving_worker_has_left(registry: Registry, clock: Clock) -> None:
    worker = registry.join(card())
    assert registry.describe()[0]["ends_in_s"] is None
    registry.drain(worker, 10.0)
    clock.now += 4
    assert registry.describe()[0]["ends_in_s"] == 6.0


async def test_a_worker_whose_stream_ends_with_the_welcome_has_left(registry: Registry) -> None:
    """And gets no requests until its silence is noticed."""
    known = card()
    hello = pb.Hello(
        stages=[pb.STAGE_DECODE],
        address=known.address,
        epoch=known.epoch,
        fingerprint=known.fingerprint,
        dtype=known.dtype,
        kv_layout=known.kv_layout,
        kv_block_shape=known.kv_block_shape,
        version=known.version,
    )

    async def reports() -> AsyncIterator[pb.WorkerReport]:
        yield pb.WorkerReport(hello=hello)
        await asyncio.Event().wait()

    replies: Any = MembershipService(registry, GatewayConfig()).Join(reports(), None)
    assert (await anext(replies)).HasField("welcome")
    assert registry.live(Stage.DECODE)
    await replies.aclose()
    assert not registry.workers


def test_only_what_another_worker_could_do_is_asked_for(registry: Registry) -> None:
    leaving = registry.join(card("a:1", stages=frozenset({Stage.PREFILL, Stage.DECODE})))
    registry.join(card("a:2", Stage.DECODE))
    prefill, decode = Stream(Stage.PREFILL), Stream(Stage.DECODE)
    leaving.streams |= {prefill, decode}
    registry.drain(leaving)
    assert (prefill.recalls, decode.recalls) == (0, 1)


@pytest.mark.parametrize("with_prefill", [False, True])
def test_pictures_leave_an_encoder_but_not_their_own_prefills(
    registry: Registry, with_prefill: bool
) -> None:
    stages = {Stage.ENCODE, Stage.PREFILL} if with_prefill else {Stage.ENCODE}
    leaving = registry.join(card("e:1", stages=frozenset(stages)))
    registry.join(card("e:2", stages=frozenset(stages)))
    picture = Stream(Stage.ENCODE)
    leaving.streams.add(picture)
    registry.drain(leaving)
    assert bool(picture.recalls) is not with_prefill


def test_another_life_on_the_same_address_is_another_worker(registry: Registry) -> None:
    first = registry.join(card())
    stream = Stream()
    first.streams.add(stream)
    second = registry.join(card(epoch=2))
    assert first is not second
    assert first.gone
    assert stream.errors[0].kind is ErrorKind.STAGE_UNAVAILABLE
    assert registry.live(Stage.DECODE) == [second]


def test_the_same_life_keeps_its_place(registry: Registry) -> None:
    first = registry.join(card())
    first.draining = True
    assert registry.join(card()) is first
    assert registry.live(Stage.DECODE) == [first]


def test_silence_is_death(registry: Registry, clock: Clock) -> None:
    silent, loud = registry.join(card("a:1")), registry.join(card("b:1"))
    stream = Stream()
    silent.streams.add(stream)
    dropped = []
    for step in range(1, 11):
        clock.now = step * registry.sweep_s
        if step == 5:
            registry.heard(loud)
        dropped += registry.sweep()
        assert dropped == ([] if clock.now <= 2.0 else [silent])
    assert "silent" in stream.errors[0].message
    assert registry.live(Stage.DECODE) == [loud]


def test_time_that_the_gateway_lost_is_nobodys_silence(registry: Registry, clock: Clock) -> None:
    """Its own loop was held up for a minute: the heartbeats wait in its sockets."""
    worker = registry.join(card())
    clock.now = 60.0
    assert registry.sweep() == []
    assert registry.live(Stage.DECODE) == [worker]
    for _ in range(10):
        clock.now += registry.sweep_s
        registry.sweep()
    assert worker.gone


@pytest.mark.parametrize("flag", ["draining", "gone"])
def test_only_the_living_get_work(registry: Registry, flag: str) -> None:
    worker = registry.join(card())
    setattr(worker, flag, True)
    with pytest.raises(EpdError) as caught:
        registry.choose(Stage.DECODE)
    assert caught.value.kind is ErrorKind.STAGE_UNAVAILABLE
    assert caught.value.retry_after_s


def test_who_asks_for_a_stage_is_to_wait_as_long_again_as_it_is_gone(
    registry: Registry, clock: Clock
) -> None:
    def wait_s(stage: Stage) -> float | None:
        with pytest.raises(EpdError) as caught:
            registry.choose(stage)
        return caught.value.retry_after_s

    clock.now = 5.0
    assert wait_s(Stage.DECODE) == 5.0, "as long as the gateway knows of none"
    worker = registry.join(card())
    clock.now = 7.0
    registry.heard(worker)
    waits = []
    for clock.now in (7.0, 8.0, 11.5, 5000.0):
        registry.drain(worker)  # it lives on, and takes nothing
        waits.append(wait_s(Stage.DECODE))
    assert waits == [1.0, 1.0, 4.5, 10.0]
    registry.join(card())
    registry.drop(worker, "died")
    assert wait_s(Stage.DECODE) == 1.0
    assert wait_s(Stage.PREFILL) == 10.0, "another's coming and going is nothing to it"


def test_who_broke_a_call_is_passed_over_only_where_there_is_another(registry: Registry) -> None:
    first, second = (registry.join(card(f"{name}:1", Stage.ENCODE)) for name in "ab")
    first.suspect = True
    for number in range(5):
        assert registry.choose_encoder(bytes([number]) * 32, 4) is second
    second.draining = True
    assert registry.choose_encoder(b"x" * 32, 4) is first
    assert registry.live(Stage.ENCODE) == []


def test_a_heartbeat_clears_suspicion(registry: Registry) -> None:
    worker = registry.join(card())
    worker.suspect = True
    registry.heard(worker)
    assert registry.choose(Stage.DECODE) is worker


def test_a_stage_that_makes_no_progress_gets_nothing(registry: Registry) -> None:
    registry.join(card()).serving = False
    assert registry.live(Stage.DECODE) == []


def test_avoided_workers_are_used_if_there_is_no_other(registry: Registry) -> None:
    first, second = registry.join(card("a:1")), registry.join(card("b:1"))
    assert {registry.choose(Stage.DECODE, [first]) for _ in range(5)} == {second}
    assert registry.choose(Stage.DECODE, [first, second]) in (first, second)
    assert not registry.has_other(Stage.DECODE, [first, second])


def test_limits_are_the_smallest(registry: Registry) -> None:
    assert registry.limits().max_context is None
    registry.join(card("p:1", Stage.PREFILL, capacity=Capacity(max_context=100, max_rows=50)))
    registry.join(card("d:1", Stage.DECODE, capacity=Capacity(max_context=80)))
    registry.join(card("e:1", Stage.ENCODE, capacity=Capacity(max_rows=40)))
    limits = registry.limits()
    assert (limits.max_context, limits.max_rows) == (80, 40)


def test_limits_follow_who_joins_drains_and_leaves(registry: Registry) -> None:
    small = registry.join(card("d:1", Stage.DECODE, capacity=Capacity(max_context=80)))
    large = registry.join(card("d:2", Stage.DECODE, capacity=Capacity(max_context=100)))
    assert registry.limits().max_context == 80
    registry.drain(small)
    assert registry.limits().max_context == 100
    again = card("d:1", Stage.DECODE, capacity=Capacity(max_context=80))
    assert registry.join(again) is small
    assert registry.limits().max_context == 80
    registry.drop(small, "gone")
    assert registry.limits().max_context == 100
    registry.drop(large, "gone")
    assert registry.limits().max_context is None


async def test_waiting_for_a_worker_ends_when_it_joins(registry: Registry) -> None:
    waiter = asyncio.create_task(registry.until_live([Stage.DECODE], 2 * LIMIT_S))
    await asyncio.sleep(0)
    assert not waiter.done()
    registry.join(card())
    await asyncio.wait_for(waiter, LIMIT_S)


async def test_waiting_for_a_worker_is_bounded(registry: Registry) -> None:
    await asyncio.wait_for(registry.until_live([Stage.DECODE], 0.01), LIMIT_S)


# --- router ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    name: str
    load: int = 0

    @property
    def identity(self) -> bytes:
        return self.name.encode()


def test_the_least_loaded_is_chosen() -> None:
    candidates = [Candidate("a", 2), Candidate("b", 1), Candidate("c", 3)]
    assert router.least_loaded(candidates, 7).name == "b"


def test_ties_go_round() -> None:
    candidates = [Candidate(name) for name in "abc"]
    chosen = Counter(router.least_loaded(candidates, turn).name for turn in range(9))
    assert set(chosen.values()) == {3}


def test_decode_is_rather_where_prefill_is(registry: Registry) -> None:
    both = registry.join(card("b:1", stages=frozenset({Stage.PREFILL, Stage.DECODE})))
    alone = registry.join(card("d:1"))
    assert {registry.choose(Stage.DECODE, near=both) for _ in range(5)} == {both}
    both.running = 6  # far more than its share
    assert registry.choose(Stage.DECODE, near=both) is alone
    both.running = 0
    assert registry.choose(Stage.DECODE, [both], near=both) is alone
    prefill = registry.join(card("p:1", Stage.PREFILL))
    both.running = alone.running = 2
    assert registry.choose(Stage.DECODE, near=prefill) in (both, alone)


def test_a_draining_process_keeps_the_requests_that_it_prefills(registry: Registry) -> None:
    both = registry.join(card("b:1", stages=frozenset({Stage.PREFILL, Stage.DECODE})))
    both.draining = True
    assert registry.choose(Stage.DECODE, near=both) is both
    with pytest.raises(EpdError):
        registry.choose(Stage.DECODE)
    both.gone = True
    with pytest.raises(EpdError):
        registry.choose(Stage.DECODE, near=both)
