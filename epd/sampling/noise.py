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


def noise_key(seed: int, choice: int, index: int) -> int:
    """Key of one output token's noise, 64 bits; every argument in 0 .. 2**64 - 1."""
    key = 0
    for part in (seed, choice, index):
        key = _mix((key + part) & _MASK)
    return key


def exponential_noise(key: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Independent Exp(1) noise for each vocabulary id; positive and finite."""
    bits = _mix_array(np.uint64(key) + (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN))
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return np.asarray(-np.log(uniform), dtype=np.float64)


def _mix(x: int) -> int:
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * _FIRST) & _MASK
    x = ((x ^ (x >> 27)) * _SECOND) & _MASK
    return x ^ (x >> 31)


def _mix_array(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    return np.asarray(x ^ (x >> np.uint64(31)), dtype=np.uint64)
