"""Noise without state: a function of (seed, choice, output index, vocabulary id).

The same token gets the same noise in every batch, after every retry, on every
machine: 64-bit integer arithmetic modulo 2**64, SplitMix64 as in Steele, Lea and
Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014).

    key   = mix(mix(mix(seed) + choice) + index)
    bits  = mix(key + (id + 1) * GOLDEN)
    u     = (bits >> 11 | 1 at half a unit) / 2**53, so 0 < u < 1
    noise = -log(u), exponentially distributed with mean 1
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_FIRST: Final = 0xBF58476D1CE4E5B9
_SECOND: Final = 0x94D049BB133111EB
_PIECE: Final = 1 << 14
_BOUND_MARGIN: Final = 1 - 1e-9
"""The bound is rounded, too."""


def noise_key(seed: int, choice: int, index: int) -> int:
    """Key of one output token's noise, 64 bits; every argument in 0 .. 2**64 - 1."""
    key = 0
    for part in (seed, choice, index):
        key = _mix((key + part) & _MASK)
    return key


def exponential_noise(key: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Independent Exp(1) noise for each vocabulary id; positive and finite."""
    uniform = ((_bits(key, ids) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return np.asarray(-np.log(uniform), dtype=np.float64)


def race(key: int, ids: NDArray[np.int64], weights: NDArray[np.float64]) -> int:
    """The index of the largest weight / noise; of equal ones the first.

    The same as by `exponential_noise` of all ids, without most of its logarithms:
    -log(u) is at least 1 - u, so weight / (1 - u) is a bound, and only ids whose bound
    reaches the best of what is known can win.
    """
    bound = weights / _least_noise(key, ids)
    best = int(bound.argmax())
    known = weights[best] / exponential_noise(key, ids[best : best + 1])[0]
    near = np.flatnonzero(bound >= known * _BOUND_MARGIN)
    ratios = weights[near] / exponential_noise(key, ids[near])
    return int(near[ratios.argmax()])


def _least_noise(key: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """1 - u for each id; in pieces that stay in a core's cache."""
    least = np.empty(len(ids))
    for start in range(0, len(ids), _PIECE):
        bits = _bits(key, ids[start : start + _PIECE])
        np.invert(bits, out=bits)
        bits >>= np.uint64(11)
        least[start : start + _PIECE] = bits
    least += 0.5
    least *= 2.0**-53
    return least


def _bits(key: int, ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    x = ids.astype(np.uint64)
    x += np.uint64(1)
    x *= np.uint64(_GOLDEN)
    x += np.uint64(key)
    return _mix_array(x)


def _mix(x: int) -> int:
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * _FIRST) & _MASK
    x = ((x ^ (x >> 27)) * _SECOND) & _MASK
    return x ^ (x >> 31)


def _mix_array(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """In place."""
    x += np.uint64(_GOLDEN)
    x ^= x >> np.uint64(30)
    x *= np.uint64(_FIRST)
    x ^= x >> np.uint64(27)
    x *= np.uint64(_SECOND)
    x ^= x >> np.uint64(31)
    return x
