"""Linear layers on packed weights: right numbers, the same bits for a row everywhere."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from epd.models.kernels import build
from epd.models.kernels.linear import LinearKernel, PackedLinear, pack_linears
from tests.unit.kernel_layers import packed_linear

SHAPES = [(64, 128), (896, 96), (33, 7), (1, 1), (50, 33), (256, 31)]


@pytest.fixture(scope="module", params=[1, 2])
def kernel(request: pytest.FixtureRequest) -> LinearKernel:
    library = build.load()
    if library is None:
        pytest.skip("no kernels on this machine")
    return LinearKernel(library, threads=request.param)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_rounds_the_true_product_once(
    kernel: LinearKernel, shape: tuple[int, int], bias: bool
) -> None:
    generator = torch.Generator().manual_seed(shape[0])
    linear = nn.Linear(*shape, bias=bias, dtype=torch.bfloat16)
    x = torch.randn(31, shape[0], generator=generator).bfloat16()
    true = F.linear(x.double(), linear.weight.double(), linear.bias.double() if bias else None)
    error = (packed_linear(kernel, linear)(x).double() - true).abs()
    # Half a unit of bfloat16, and what single precision loses in the sum.
    assert (error <= true.abs() * 2.0**-8 + 1e-4).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_bits_of_a_row_depend_on_that_row_only(
    kernel: LinearKernel, shape: tuple[int, int]
) -> None:
    linear = nn.Linear(*shape, dtype=torch.bfloat16)
    run = packed_linear(kernel, linear)
    x = torch.randn(100, shape[0]).bfloat16()
    whole = run(x)
    for rows in range(1, 30):
        assert torch.equal(run(x[rows : 2 * rows]), whole[rows : 2 * rows])
    assert torch.equal(run(x.flip(0)).flip(0), whole)
    x[50] = float("nan")
    assert torch.equal(run(x)[:50], whole[:50])
    assert run(x)[50].isnan().all()


def test_any_layout_of_rows(kernel: LinearKernel) -> None:
    linear = nn.Linear(64, 32, dtype=torch.bfloat16)
    run = packed_linear(kernel, linear)
    x = torch.randn(6, 5, 64).bfloat16()
    whole = run(x)
    assert whole.shape == (6, 5, 32)
    assert torch.equal(run(x.transpose(0, 1)), whole.transpose(0, 1))
    assert run(x[:0]).shape == (0, 5, 32)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 64, dtype=torch.bfloat16)
        self.inner = nn.Linear(64, 64, dtype=torch.bfloat16)
        self.other = nn.Linear(64, 64, dtype=torch.float32)
        self.head = nn.Linear(64, 40, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight


def test_a_whole_model_keeps_what_others_use(kernel: LinearKernel) -> None:
    model = _Tied().requires_grad_(False)
    x = torch.randn(3, 64).bfloat16()
    wanted = model.head(model.inner(x))
    row = model.embed(torch.tensor([7]))
    pack_linears(model, kernel)
    assert isinstance(model.inner.forward, PackedLinear)
    assert not isinstance(model.other.forward, PackedLinear)
    assert torch.allclose(model.head(model.inner(x)), wanted, atol=0.02, rtol=0.02)
    assert torch.equal(model.embed(torch.tensor([7])), row)
    assert model.inner.weight.device.type == "meta", "the plain weight is not held twice"
    assert model.inner.weight.dtype is torch.bfloat16
