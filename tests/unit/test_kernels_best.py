"""The greedy token by bits is torch's argmax of the numbers."""

from __future__ import annotations

from ctypes import c_int64, c_void_p

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from epd.jobs import SampledToken, SamplingParams
from epd.models.kernels import build
from epd.sampling.sampler import Sampler
from epd.sampling.state import SamplerState

library = build.load()
pytestmark = pytest.mark.skipif(library is None, reason="no kernels on this machine")


def best(logits: torch.Tensor) -> list[int]:
    assert library is not None
    found = (c_int64 * len(logits))()
    run = library.handle.epd_best
    run.argtypes, run.restype = (c_void_p, c_int64, c_int64, c_void_p), None
    run(logits.data_ptr(), *logits.shape, found)
    return list(found)


def expected(row: torch.Tensor) -> int:
    largest = row.float().amax()
    return int(row.float().numpy().argmax()) if torch.isfinite(largest) else -1


# Few different numbers, so that there are equal ones: zeros, infinities, NaNs of both signs.
BITS = st.sampled_from((0x0000, 0x8000, 0x0001, 0x8001, 0x3F80, 0xBF80, 0x7F80, 0xFF80))
ANY = st.one_of(BITS, BITS, BITS, st.sampled_from((0x7FC0, 0xFFC0)), st.integers(0, 0xFFFF))


@given(st.integers(1, 3), st.integers(1, 70), st.data())
def test_any_bits(rows: int, n: int, data: st.DataObject) -> None:
    bits = data.draw(arrays.arrays(np.uint16, (rows, n), elements=ANY))
    logits = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    assert best(logits) == [expected(row) for row in logits]


def test_rows_of_a_real_vocabulary_with_many_equal_ones() -> None:
    logits = torch.randn(8, 151_936, generator=torch.Generator().manual_seed(1)).bfloat16()
    logits[3] = -logits[3].abs()
    logits[4] = float("-inf")
    logits[5, 7] = float("nan")
    logits[6, 100] = float("inf")
    assert best(logits) == [expected(row) for row in logits]
    assert best(logits)[4:7] == [-1, -1, -1]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=5, temperature=0.0),
        SamplingParams(max_tokens=5, temperature=0.0, logprobs=True, top_logprobs=3),
        SamplingParams(max_tokens=5, temperature=0.0, logit_bias={3: 20.0}),
        SamplingParams(max_tokens=5, temperature=0.8, seed=4),
    ],
)
def test_a_sampler_gives_the_same_from_both_forms(params: SamplingParams) -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(2)).bfloat16()
    logits[1, 4] = float("nan")
    states = [SamplerState(params, [1, 2]) for _ in logits]
    apart = Sampler(500).sample(logits.float(), states)
    found = Sampler(500).sample(logits, states, best(logits))
    assert [isinstance(token, SampledToken) for token in found] == [True, False, True]
    assert found[::2] == apart[::2]
    assert str(found[1]) == str(apart[1])
    assert Sampler(500).sample(logits, states)[::2] == apart[::2]
