"""The noise: fixed forever, uniform, independent of everything that is not in its key."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.sampling.noise import exponential_noise, noise_key, race


def test_known_values() -> None:
    """Frozen: a change breaks 'the same seed gives the same text' across versions."""
    assert noise_key(0, 0, 0) == KEYS[0, 0, 0]
    assert noise_key(42, 1, 7) == KEYS[42, 1, 7]
    noise = exponential_noise(noise_key(42, 1, 7), np.arange(3))
    assert noise.tolist() == pytest.approx(NOISE, rel=1e-14)


KEYS = {(0, 0, 0): 0x238275BC38FCBE91, (42, 1, 7): 0xD5755CF05C9C2237}
NOISE = [1.7026134378062363, 0.7445674674528812, 1.9122961689292841]


def test_integer_arithmetic_equals_plain_python() -> None:
    mask = (1 << 64) - 1

    def mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    key = noise_key(2**64 - 1, 3, 5)
    ids = np.array([0, 1, 151_935, 2**40])
    bits = [mix((key + (int(i) + 1) * 0x9E3779B97F4A7C15) & mask) for i in ids]
    wanted = -np.log([((b >> 11) + 0.5) / 2**53 for b in bits])
    assert np.array_equal(exponential_noise(key, ids), wanted)


def test_noise_of_an_id_does_not_depend_on_the_other_ids() -> None:
    key = noise_key(1, 0, 0)
    whole = exponential_noise(key, np.arange(1000))
    some = np.array([999, 5, 500])
    assert np.array_equal(exponential_noise(key, some), whole[some])


def test_every_part_of_the_key_matters() -> None:
    keys = {noise_key(s, c, i) for s in range(10) for c in range(10) for i in range(10)}
    assert len(keys) == 1000


@pytest.mark.parametrize("along", ["ids", "index", "seed", "choice"])
def test_noise_is_exponential_along_each_part(along: str) -> None:
    """Kolmogorov-Smirnov distance to Exp(1), and no correlation of neighbours."""
    n = 20_000
    if along == "ids":
        noise = exponential_noise(noise_key(7, 0, 0), np.arange(n))
    else:
        parts = {"seed": 7, "choice": 0, "index": 0}
        one = np.array([11])
        noise = np.concatenate(
            [exponential_noise(noise_key(**{**parts, along: i}), one) for i in range(n)]
        )
    assert noise.min() > 0
    assert np.isfinite(noise).all()
    uniform = np.sort(np.exp(-noise))
    distance = np.abs(uniform - (np.arange(n) + 0.5) / n).max()
    assert distance < 1.95 / np.sqrt(n)  # 0.1 % significance
    correlation = np.corrcoef(noise[:-1], noise[1:])[0, 1]
    assert abs(correlation) < 4 / np.sqrt(n)


@settings(deadline=None, max_examples=200)
@given(
    key=st.integers(0, 2**64 - 1),
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(1, 3000),
    spread=st.sampled_from([0.0, 0.1, 3.0, 30.0]),
)
def test_the_race_is_won_as_if_all_noise_were_known(
    key: int, seed: int, size: int, spread: float
) -> None:
    random = np.random.default_rng(seed)
    ids = np.sort(random.choice(200_000, size, replace=False))
    weights = np.exp(random.normal(size=size) * spread - 50)
    ratios = weights / exponential_noise(key, ids)
    assert race(key, ids, weights) == ratios.argmax()
