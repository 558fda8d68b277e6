"""int8 weights: rounded as promised, multiplied exactly, by the kernel and by torch alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from epd.config_sources import load_config
from epd.errors import EpdError
from epd.handoff import kv_contract
from epd.kv.pool import KvPool
from epd.models.kernels import build
from epd.models.kernels.layer import FusedLayer
from epd.models.kernels.linear import Int8Kernel, pack_linears
from epd.models.lm import ForwardBatch, LanguageModel, SequenceSlice
from epd.models.quantize import GROUP, Int8Linear, dequantize, quantize, quantize_linears
from tests.tiny import FAMILIES
from tests.unit.kernel_layers import packed_linear
from tests.unit.lm_batches import logits_of

SHAPES = [(64, 128), (896, 96), (33, 7), (1, 1), (50, 33), (257, 131)]


@pytest.fixture(scope="module", params=[1, 2])
def kernel(request: pytest.FixtureRequest) -> Int8Kernel:
    library = build.load()
    if library is None:
        pytest.skip("no kernels on this machine")
    return Int8Kernel(library, threads=request.param)


def _linear(k: int, n: int, bias: bool = True) -> nn.Linear:
    torch.manual_seed(k + n)
    return nn.Linear(k, n, bias=bias, dtype=torch.bfloat16).requires_grad_(False)


def _true(linear: nn.Linear, x: Tensor) -> Tensor:
    weight = dequantize(*quantize(linear.weight.detach())).double()
    bias = None if linear.bias is None else linear.bias.double()
    return F.linear(x.double(), weight, bias)


def test_rounding_is_to_the_nearest_of_255_steps() -> None:
    weight = torch.randn(40, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[3, :GROUP] = 0
    weight[5, 7] = 90.0  # an outlier spoils its own group only
    values, scales = quantize(weight)
    assert values.dtype is torch.int8
    assert values.shape == (40, 300)
    assert scales.shape == (40, 3)
    error = (dequantize(values, scales) - weight.float()).abs()
    each = scales.float().repeat_interleave(GROUP, 1)[:, :300]
    assert (error <= each / 2 * 1.0001).all()
    assert values.abs().max() == 127
    assert error[5, GROUP:].max() < 0.02
    assert not values[3, :GROUP].any()
    assert not scales[3, 0]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_rounds_the_product_of_the_rounded_weights_once(
    kernel: Int8Kernel, shape: tuple[int, int], bias: bool
) -> None:
    linear = _linear(*shape, bias)
    x = torch.randn(31, shape[0], generator=torch.Generator().manual_seed(1)).bfloat16()
    true = _true(linear, x)
    error = (packed_linear(kernel, linear)(x).double() - true).abs()
    assert (error <= true.abs() * 2.0**-8 + 2e-4).all()
    plain = F.linear(x.double(), linear.weight.double())
    lost = F.linear(x.double(), linear.weight.double() - dequantize(*quantize(linear.weight)))
    assert lost.norm() < 0.01 * plain.norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_torch_rounds_the_same_product(shape: tuple[int, int]) -> None:
    linear = _linear(*shape)
    x = torch.randn(31, shape[0], generator=torch.Generator().manual_seed(1)).bfloat16()
    true = _true(linear, x)
    for row_tile in (None, 16):
        error = (Int8Linear(linear, row_tile)(x).double() - true).abs()
        assert (error <= true.abs() * 2.0**-8 + 2e-4).all()


def test_large_and_small_activations_side_by_side(kernel: Int8Kernel) -> None:
    """One activation 10,000 times the others, as language models have them."""
    linear = _linear(256, 64)
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    x[:, 17] = 10_000.0
    x[3] *= 1e-30
    true = _true(linear, x)
    unit = x.abs().amax(1, keepdim=True).double() * 2.0**-15
    weight = dequantize(*quantize(linear.weight)).double().abs().sum(1)
    error = (packed_linear(kernel, linear)(x).double() - true).abs()
    assert (error <= true.abs() * 2.0**-8 + unit * weight).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_bits_of_a_row_depend_on_that_row_only(kernel: Int8Kernel, shape: tuple[int, int]) -> None:
    run = packed_linear(kernel, _linear(*shape))
    x = torch.randn(100, shape[0]).bfloat16()
    whole = run(x)
    for rows in range(1, 30):
        assert torch.equal(run(x[rows : 2 * rows]), whole[rows : 2 * rows])
    assert torch.equal(run(x.flip(0)).flip(0), whole)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_stay_visible(kernel: Int8Kernel, bad: float) -> None:
    run = packed_linear(kernel, _linear(200, 40))
    x = torch.randn(20, 200).bfloat16()
    whole = run(x)
    x[7, 150] = bad
    found = run(x)
    assert found[7].isnan().all()
    assert torch.equal(found[:7], whole[:7])


def test_weights_are_held_once(kernel: Int8Kernel) -> None:
    """A byte a weight and two a group of 128, in panels of 32 outputs."""
    model = nn.Sequential(_linear(256, 64), _linear(64, 32))
    panels_and_groups = 2 * 2 + 1 * 1
    assert pack_linears(model, kernel).numel() == panels_and_groups * 32 * (128 + 2)
    assert all(layer.weight.device.type == "meta" for layer in model)


def test_torch_holds_weights_once_too() -> None:
    first = _linear(256, 64)
    model = nn.Sequential(first, _linear(64, 32))
    wanted = _true(first, torch.ones(1, 256).bfloat16())
    quantize_linears(model, None)
    assert all(layer.weight.device.type == "meta" for layer in model)
    assert torch.allclose(model[0](torch.ones(1, 256).bfloat16()).double(), wanted, rtol=0.01)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_by_kernel_and_by_torch(family: str, tiny_checkpoint: Callable[..., Path]) -> None:
    path = tiny_checkpoint(family, "bfloat16")
    by_torch = LanguageModel.load(path, kernels="off", quantize="int8")
    best = LanguageModel.load(path, quantize="int8")
    assert logits_of(best).sub(logits_of(by_torch)).abs().max() < 0.1
    plain = logits_of(LanguageModel.load(path))
    assert not torch.equal(logits_of(best), plain)
    assert logits_of(best).sub(plain).norm() < 0.1 * plain.norm()
    if build.load() is not None:
        layers = best.model.get_decoder().layers
        assert all(isinstance(layer.forward, FusedLayer) for layer in layers)


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_exact_mode_has_int8_weights_too(
    kernels: Literal["auto", "off"], tiny_checkpoint: Callable[..., Path]
) -> None:
    path = tiny_checkpoint("qwen3_vl", "bfloat16")
    lm = LanguageModel.load(path, exact=True, kernels=kernels, quantize="int8")
    ids = torch.randint(10, 200, (40,), generator=torch.Generator().manual_seed(0))
    positions, _ = lm.positions(ids, [], 40)
    pool = KvPool(lm.kv_layout, 2)
    whole = lm.forward(
        ForwardBatch(ids, positions, [SequenceSlice(40, 40, [0, 1])], range(40)), pool
    )
    start, rows = 0, []
    for n in (1, 7, 32):
        part = slice(start, start + n)
        chunk = ForwardBatch(
            ids[part], positions[:, part], [SequenceSlice(n, start + n, [0, 1])], range(n)
        )
        rows.append(lm.forward(chunk, pool))
        start += n
    assert torch.equal(torch.cat(rows), whole)


def test_what_int8_may_meet(tiny_checkpoint: Callable[..., Path]) -> None:
    """Its keys and values have another name; its worker another numerics id."""
    path = tiny_checkpoint("qwen3_vl", "bfloat16")
    plain, int8, decode = (
        LanguageModel.load(path, quantize=quantize) for quantize in ("off", "int8", "int8-decode")
    )
    assert int8.kv_layout.name == plain.kv_layout.name + "+int8"
    assert decode.kv_layout.name == plain.kv_layout.name
    assert int8.numerics_id == decode.numerics_id != plain.numerics_id
    ours, theirs = (kv_contract(lm.spec, lm.kv_layout, 7) for lm in (int8, plain))
    with pytest.raises(EpdError, match="layout is 'kv-block-major/1', expected"):
        theirs.check(ours)


def test_which_stage_is_int8() -> None:
    model = load_config(flags={"model.quantize": "int8-decode"}, environ={}).model
    assert (model.quantize_in("prefill"), model.quantize_in("decode")) == ("off", "int8-decode")
    model = load_config(flags={"model.quantize": "int8"}, environ={}).model
    assert (model.quantize_in("prefill"), model.quantize_in("decode")) == ("int8", "int8")
    flags = {"model.quantize": "int8-decode", "model.exact": True}
    with pytest.raises(EpdError, match="exact promises"):
        load_config(flags=flags, environ={})


def test_only_cpus_run_int8(tiny_checkpoint: Callable[..., Path]) -> None:
    # torch has this device on every machine; where there is no GPU, "cuda" is refused before
    with pytest.raises(EpdError, match="runs on CPUs, not on meta"):
        LanguageModel.load(tiny_checkpoint("qwen3_vl"), device="meta", quantize="int8")
