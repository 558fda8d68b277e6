"""The pieces of exact mode: bits that depend on nothing but their row."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from epd.models.exact import (
    ROW_TILE,
    _exp,
    _neighbour_sum,
    _tanh,
    exact_attention,
    make_row_invariant,
)


def test_exponential_is_accurate() -> None:
    x = -torch.cat([torch.linspace(0, 20, 20001), torch.linspace(20, 86.9, 2000)])
    relative = (_exp(x).double() / x.double().exp() - 1).abs()
    assert relative.max() < 2.5e-7
    assert _exp(torch.tensor([-88.0, float("-inf")])).tolist() == [0.0, 0.0]
    assert _exp(torch.zeros(1)).item() == 1.0


def test_tanh_is_accurate() -> None:
    x = torch.linspace(-12, 12, 10001)
    assert (_tanh(x).double() - x.double().tanh()).abs().max() < 3e-7


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 33])
def test_trailing_zeros_change_no_bit_of_a_sum(n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, 500, generator=generator)
    x[:, 0] = -0.0  # the sign of zero is a bit, too
    wanted = _neighbour_sum(x)
    assert torch.allclose(wanted, x.sum(0), atol=1e-5)
    for extra in (1, 2, 5, 31):
        padded = torch.cat([x, torch.zeros(extra, 500)])
        assert torch.equal(_neighbour_sum(padded).view(torch.int32), wanted.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 128), (96, 50), (33, 7)])
def test_linear_rows_do_not_depend_on_their_number_or_place(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    linear = nn.Linear(*shape, dtype=dtype)
    x = torch.randn(150, shape[0], dtype=dtype)
    plain = linear(x)
    make_row_invariant(linear)
    wanted = linear(x)
    assert torch.allclose(wanted, plain, atol=0.02 if dtype is torch.bfloat16 else 1e-5)
    for start, stop in ((0, 1), (5, 6), (3, 20), (149, 150), (1, 150)):
        assert torch.equal(linear(x[start:stop]), wanted[start:stop])
    assert linear(x[:0]).shape == (0, shape[1])
    assert torch.equal(linear(x.view(3, 50, -1)), wanted.view(3, 50, -1))


def test_every_product_has_the_same_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel is chosen by. On another CPU than this one it may matter more."""
    shapes = set()
    original = F.linear

    def record(x: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
        shapes.add(x.shape)
        return original(x, *args)

    linear = nn.Linear(64, 32)
    make_row_invariant(linear)
    monkeypatch.setattr(F, "linear", record)
    for rows in (1, 15, 16, 17, 100):
        assert linear(torch.randn(rows, 64)).shape == (rows, 32)
    assert shapes == {(ROW_TILE, 64)}


def test_rows_of_a_large_attention_equal_rows_alone() -> None:
    """More elements than one product tensor may have: split by rows."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, h, 32, generator=generator) for n, h in ((90, 4), (300, 2), (300, 2)))
    mask = torch.arange(300)[None] <= torch.arange(210, 300)[:, None]
    whole = exact_attention(q, k, v, mask, scale=0.2)
    for i in (0, 1, 45, 89):
        seen = 210 + i + 1
        alone = exact_attention(q[i : i + 1], k[:seen], v[:seen], mask[i : i + 1, :seen], scale=0.2)
        assert torch.equal(alone[0], whole[i])
