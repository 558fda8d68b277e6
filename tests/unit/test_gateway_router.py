"""Which encoder gets an image: cost, queue and affinity together, on synthetic encoders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd import __version__
from epd.errors import EpdError
from epd.jobs import Stage
from gateway import router
from gateway.router import Kept, for_image
from gateway.worker import Card
from gateway.workers import Registry

ROWS = 100


@dataclass
class Encoder:
    name: str
    rows_ahead: int = 0
    us_per_row: float = 0.0
    load: int = 0

    @property
    def identity(self) -> bytes:
        return self.name.encode()

    @property
    def life(self) -> Hashable:
        return self.name


def idle(names: str = "abcd", cost: float = 0.0) -> list[Encoder]:
    return [Encoder(name, us_per_row=cost) for name in names]


def choose(candidates: list[Encoder], digest: bytes, kept: Kept | None = None) -> str:
    return for_image(candidates, digest, ROWS, kept or Kept()).name


@given(st.binary(min_size=1, max_size=8), st.sampled_from([0.0, 50.0]))
def test_a_digest_keeps_its_encoder_when_another_leaves(digest: bytes, cost: float) -> None:
    home = choose(idle("abcde", cost), digest)
    for leaving in "abcde":
        if leaving != home:
            rest = [encoder for encoder in idle("abcde", cost) if encoder.name != leaving]
            assert choose(rest, digest) == home


def test_digests_spread() -> None:
    chosen = Counter(choose(idle(), bytes([i])) for i in range(200))
    assert set(chosen) == set("abcd")
    assert min(chosen.values()) > 25


@given(st.lists(st.binary(min_size=2, max_size=4), min_size=4, max_size=16, unique=True))
def test_the_images_of_one_request_are_shared_out(digests: list[bytes]) -> None:
    """Whatever their digests: no encoder is more than one image and a half ahead."""
    encoders, kept = idle("ab", cost=10.0), Kept()
    for digest in digests:
        chosen = for_image(encoders, digest, ROWS, kept)
        chosen.rows_ahead += ROWS
        kept.sent(digest, chosen.life)
    assert abs(encoders[0].rows_ahead - encoders[1].rows_ahead) <= 1.5 * ROWS


def test_a_slow_encoder_gets_its_share_and_no_more() -> None:
    """One is three times as fast: it gets three quarters of the work."""
    encoders = [Encoder("fast", us_per_row=10.0), Encoder("slow", us_per_row=30.0)]
    for number in range(400):
        for_image(encoders, number.to_bytes(2), ROWS, Kept()).rows_ahead += ROWS
    fast, slow = (encoder.rows_ahead for encoder in encoders)
    assert 2.7 < fast / slow < 3.3


def test_a_queue_of_icons_is_shorter_than_one_photograph() -> None:
    icons = Encoder("a", rows_ahead=5 * 4, us_per_row=10.0, load=5)
    photograph = Encoder("b", rows_ahead=4000, us_per_row=10.0, load=1)
    assert all(choose([icons, photograph], bytes([i])) == "a" for i in range(20))


def test_who_has_the_image_is_asked_again_unless_others_are_sooner() -> None:
    digest, kept = b"picture", Kept()
    home = choose(idle(cost=10.0), digest)
    other = next(name for name in "abcd" if name != home)
    kept.sent(digest, other)  # e.g. home was busy then
    encoders = {encoder.name: encoder for encoder in idle(cost=10.0)}
    encoders[other].rows_ahead = ROWS // 2
    encoders[home].rows_ahead = ROWS
    assert choose(list(encoders.values()), digest, kept) == other
    encoders[other].rows_ahead = 10 * ROWS
    encoders[home].rows_ahead = 0
    assert choose(list(encoders.values()), digest, kept) != other


def test_an_encoder_that_measured_nothing_yet_is_as_good_as_the_usual_one() -> None:
    encoders = [*idle("abc", cost=20.0), Encoder("new")]
    chosen = Counter(choose(encoders, bytes([i])) for i in range(200))
    assert min(chosen.values()) > 25


@given(
    st.lists(
        st.tuples(st.integers(0, 5000), st.sampled_from([0.0, 5.0, 80.0]), st.booleans()),
        min_size=1,
        max_size=6,
    ),
    st.binary(min_size=1, max_size=4),
    st.integers(1, 3000),
)
def test_nobody_waits_much_longer_than_it_must(
    state: list[tuple[int, float, bool]], digest: bytes, rows: int
) -> None:
    encoders = [Encoder(str(i), ahead, cost) for i, (ahead, cost, _) in enumerate(state)]
    kept = Kept()
    for encoder, (_, _, has) in zip(encoders, state, strict=True):
        if has:
            kept.sent(digest, encoder.life)
    known = [encoder.us_per_row for encoder in encoders if encoder.us_per_row]
    usual = sum(known) / len(known) if known else 1.0

    def done_in(encoder: Encoder) -> float:
        own = 0 if kept.has(digest, encoder.life) else rows
        return (encoder.rows_ahead + own) * (encoder.us_per_row or usual)

    chosen = for_image(encoders, digest, rows, kept)
    assert done_in(chosen) <= min(map(done_in, encoders)) + 0.5 * rows * usual + 1e-6


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 2)), max_size=60))
def test_what_was_sent_longest_ago_is_forgotten(steps: list[tuple[bool, int, int]]) -> None:
    kept = Kept(most=5)
    model: list[Any] = []
    for sent, digest, encoder in steps:
        pair = (bytes([digest]), encoder)
        model = [other for other in model if other != pair]
        if sent:
            kept.sent(*pair)
            model = [*model, pair][-5:]
        else:
            kept.forget(*pair)
        assert len(kept) == len(model)
        assert all(kept.has(*other) for other in model)
        assert kept.has(*pair) is sent


def card(address: str, epoch: int = 1) -> Card:
    return Card(address, epoch, frozenset({Stage.ENCODE}), "f", "float32", version=__version__)


def test_the_registry_counts_what_it_sent_until_the_encoder_says_what_it_has() -> None:
    registry = Registry("f", "float32", 2.0, lambda: 0.0)
    encoders = [registry.join(card(name)) for name in ("a:1", "b:1")]
    chosen = {registry.choose_encoder(bytes([i]), ROWS) for i in range(2)}
    first = registry.choose_encoder(b"x", ROWS)
    before = first.rows_ahead
    assert registry.choose_encoder(b"x", ROWS) is first, "the same image: nothing to encode"
    assert first.rows_ahead == before
    assert sum(encoder.pending_rows for encoder in encoders) == 3 * ROWS
    assert chosen <= set(encoders)
    registry.heard(first)
    assert first.rows_ahead == 0
    registry.not_encoded(b"x", first)
    registry.choose_encoder(b"x", ROWS)
    assert sum(encoder.pending_rows for encoder in encoders) >= ROWS


def test_a_restarted_encoder_keeps_nothing() -> None:
    registry = Registry("f", "float32", 2.0, lambda: 0.0)
    registry.join(card("a:1"))
    registry.choose_encoder(b"x", ROWS)
    again = registry.join(card("a:1", epoch=2))
    assert registry.choose_encoder(b"x", ROWS) is again
    assert again.pending_rows == ROWS


def test_the_encoder_to_avoid_is_the_last_choice() -> None:
    registry = Registry("f", "float32", 2.0, lambda: 0.0)
    one, other = (registry.join(card(name)) for name in ("a:1", "b:1"))
    for number in range(8):
        assert registry.choose_encoder(bytes([number]), ROWS, [one]) is other
    registry.drop(other, "gone")
    assert registry.choose_encoder(b"x", ROWS, [one]) is one


def test_a_draining_process_encodes_for_the_requests_that_it_prefills() -> None:
    registry = Registry("f", "float32", 2.0, lambda: 0.0)
    both = registry.join(replace(card("a:1"), stages=frozenset(Stage), kv_layout="l"))
    both.draining = True
    assert registry.choose_encoder(b"x", ROWS, near=both) is both
    with pytest.raises(EpdError):
        registry.choose_encoder(b"x", ROWS)


def test_ties_of_load_go_round_still() -> None:
    chosen = Counter(router.least_loaded(idle("abc"), turn).name for turn in range(9))
    assert set(chosen.values()) == {3}


# --- prompts -----------------------------------------------------------------------------

BEGINNING = [bytes([n]) for n in range(8)]


def for_prefix(workers: list[Encoder], kept: Kept, names: list[bytes], turn: int = 0) -> str:
    return router.for_prefix(workers, names, kept, turn).name


def sent(kept: Kept, worker: str, names: list[bytes]) -> None:
    for name in names:
        kept.sent(name, worker)


def test_a_prompt_goes_where_most_of_its_beginning_was_sent() -> None:
    kept = Kept()
    sent(kept, "b", BEGINNING[:3])
    sent(kept, "c", BEGINNING[:5])
    sent(kept, "d", BEGINNING[5:])  # of no use without what comes before
    assert {for_prefix(idle(), kept, BEGINNING, turn) for turn in range(8)} == {"c"}
    assert {for_prefix(idle(), kept, BEGINNING[:3], turn) for turn in range(8)} == {"b", "c"}
    assert {for_prefix(idle(), kept, [b"new"], turn) for turn in range(8)} == set("abcd")


def test_a_new_prompt_goes_to_the_least_loaded() -> None:
    workers = [Encoder("a", load=2), Encoder("b", load=1)]
    assert for_prefix(workers, Kept(), BEGINNING) == "b"
    assert for_prefix(workers, Kept(), []) == "b"


def test_a_busy_worker_shares_a_popular_beginning_with_others() -> None:
    """All prompts begin with the same words: one worker must not get them all."""
    kept, workers = Kept(), idle("abc")
    for turn in range(60):
        chosen = router.for_prefix(workers, BEGINNING[:2], kept, turn)
        chosen.load += 1
        sent(kept, chosen.name, BEGINNING[:2])
    assert max(w.load for w in workers) - min(w.load for w in workers) < 20
    assert min(w.load for w in workers) > 10


def test_turns_of_a_conversation_stay_together_in_the_registry() -> None:
    registry = Registry("f", "float32", 2.0, lambda: 0.0)
    both = [_kv_worker(registry, f"w:{n}") for n in range(2)]
    assert registry.has_choice
    first = registry.choose(Stage.PREFILL, beginning=BEGINNING[:3])
    first.running = 1  # the other would be the least loaded
    assert registry.choose(Stage.PREFILL, beginning=BEGINNING[:6]) is first
    assert registry.choose(Stage.PREFILL, [first], beginning=BEGINNING) is not first
    assert registry.choose(Stage.PREFILL, beginning=[b"other"]) is not first
    registry.drop(both[0], "test")
    assert not registry.has_choice


def _kv_worker(registry: Registry, address: str) -> Any:
    card = Card(
        address=address,
        epoch=1,
        stages=frozenset({Stage.PREFILL}),
        fingerprint="f",
        dtype="float32",
        version=__version__,
    )
    return registry.join(card)
