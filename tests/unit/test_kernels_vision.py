"""Vision towers on the kernels: the same rows, and torch wherever they can't run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from epd.models import vision_attention
from epd.models.checkpoint import load_part
from epd.models.encoder import VisionEncoder
from epd.models.kernels import build, vision
from epd.models.kernels.dense import DenseKernel
from epd.models.kernels.linear import LinearKernel, PackedLinear, pack_linears
from epd.models.kernels.patches import PackedPatches, pack_patches
from epd.models.kernels.vision import FusedVisionLayer, fuse_vision_layers
from epd.models.processor import PreparedImage, Processor
from tests.tiny import FAMILIES
from tests.unit.kernel_layers import another_part, another_residual

LIBRARY = build.load()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="no kernels on this machine")
MODULE: Any = SimpleNamespace(is_causal=False, training=False)


def _random(batch: int, tokens: int, heads: int, dim: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    made = [torch.randn(batch, tokens, heads, dim, generator=generator) for _ in range(3)]
    return [x.bfloat16().transpose(1, 2) for x in made]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of patches of each call of the attention kernel by itself."""
    seen: list[int] = []
    original = DenseKernel.__call__

    def record(self: DenseKernel, query: Tensor, *args: Any) -> Tensor:
        seen.append(query.shape[2])
        return original(self, query, *args)

    monkeypatch.setattr(DenseKernel, "__call__", record)
    return seen


# --- attention


@pytest.mark.parametrize(
    "shape",
    [
        *((1, 50, 4, 64), (3, 33, 2, 80), (2, 100, 3, 10), (1, 1, 1, 16), (2, 1, 3, 72)),
        *((1, 700, 2, 72), (2, 265, 2, 64), (1, 529, 1, 128), (5, 12, 2, 7)),
    ],
)
def test_every_patch_sees_its_whole_picture(shape: tuple[int, ...], calls: list[int]) -> None:
    q, k, v = _random(*shape)
    out, _ = vision_attention.vision_attention(MODULE, q, k, v, None, scaling=0.3)
    wanted = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=0.3)
    assert calls
    assert torch.allclose(out.double(), wanted.transpose(1, 2), atol=8e-3, rtol=8e-3)
    alone, _ = vision_attention.vision_attention(MODULE, q[-1:], k[-1:], v[-1:], None, scaling=0.3)
    assert torch.equal(alone[0], out[-1]), "a picture's bits are its own"


@pytest.mark.parametrize("scale", [0.125, 30.0])
def test_large_scores_and_outliers(scale: float) -> None:
    """Later keys with far larger scores: what was added up before shrinks to nothing."""
    q, k, v = _random(1, 600, 2, 64)
    k[:, :, 300:] *= 8
    k[:, :, 599] = q[:, :, 0] * 4
    assert LIBRARY is not None
    out = DenseKernel(LIBRARY, 1)(q, k, v, scale)
    wanted = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=scale)
    assert out.isfinite().all()
    assert torch.allclose(out.double(), wanted.transpose(1, 2), atol=0.02, rtol=0.02)


def test_threads_and_layout_change_no_bit() -> None:
    assert LIBRARY is not None
    kernel = DenseKernel(LIBRARY, 1)
    q, k, v = _random(3, 170, 4, 40)
    one = kernel(q, k, v, 0.2)
    assert torch.equal(DenseKernel(LIBRARY, 2)(q, k, v, 0.2), one)
    assert torch.equal(kernel(q.contiguous(), k.contiguous(), v.contiguous(), 0.2), one)
    q, k, v = (torch.cat([x, x], 3)[..., ::2] for x in (q, k, v))
    assert q.stride(3) == k.stride(3) == v.stride(3) == 2
    wanted = kernel(q.contiguous(), k.contiguous(), v.contiguous(), 0.2)
    assert torch.equal(kernel(q, k, v, 0.2), wanted)


def test_values_of_another_size_and_nan_stay_where_they_are() -> None:
    assert LIBRARY is not None
    q, k, v = _random(1, 90, 2, 16)
    v = torch.cat([v, v[..., :5]], 3)
    q[0, 1, 37] = float("nan")
    out = DenseKernel(LIBRARY, 1)(q, k, v, 0.25)
    bad = out.isnan().flatten(2).any(2)[0]
    assert bad.nonzero().tolist() == [[37]]
    assert not out[0, :, 0].isnan().any(), "another head"
    wanted = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=0.25)
    left = ~wanted.transpose(1, 2).isnan()
    assert torch.allclose(out.double()[left], wanted.transpose(1, 2)[left], atol=8e-3, rtol=8e-3)


@pytest.mark.parametrize(
    "options", [{"is_causal": True}, {"mask": True}, {"dtype": torch.float32}], ids=str
)
def test_what_the_kernel_does_not_know_is_left_to_torch(
    options: dict[str, Any], calls: list[int]
) -> None:
    q, k, v = (x.to(options.get("dtype", torch.bfloat16)) for x in _random(1, 20, 2, 16))
    mask = torch.ones(1, 1, 20, 20).tril().bool() if "mask" in options else None
    causal = options.get("is_causal", False)
    out, _ = vision_attention.vision_attention(MODULE, q, k, v, mask, is_causal=causal)
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    assert not calls
    assert torch.allclose(out, wanted.transpose(1, 2), atol=8e-3)


# --- layers


def _layers(model: nn.Module) -> list[Any]:
    return [layer for layer in model.modules() if hasattr(layer, "mlp") and _has_attention(layer)]


def _has_attention(layer: Any) -> bool:
    return hasattr(layer, "attn") or hasattr(layer, "self_attn")


def _tower(path: Path) -> Any:
    assert LIBRARY is not None
    model = load_part(path, "encode", "bfloat16", attn=vision_attention.NAME)
    pack_linears(model, LinearKernel(LIBRARY, 1))
    return model


def _prepared(path: Path, *sizes: tuple[int, int]) -> list[PreparedImage]:
    processor = Processor.load(path)
    pictures = [Image.effect_noise(size, 80).convert("RGB") for size in sizes]
    return [processor.prepare(picture, len(sizes)) for picture in pictures]


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_every_served_family(
    family: str, tiny_checkpoint: Callable[..., Path], calls: list[int]
) -> None:
    path = tiny_checkpoint(family, "bfloat16")
    prepared = _prepared(path, (90, 64))
    plain = VisionEncoder.load(path, kernels="off").encode(prepared)[0]
    encoder = VisionEncoder.load(path)
    linears = [module for module in encoder._model.modules() if type(module) is nn.Linear]
    assert linears
    assert all(isinstance(linear.forward, PackedLinear) for linear in linears)
    patches = [module for module in encoder._model.modules() if "Conv" in type(module).__name__]
    assert [type(module.forward) for module in patches] == [PackedPatches]
    layers = _layers(encoder._model)
    assert len(layers) == 3
    assert all(isinstance(layer.forward, FusedVisionLayer) for layer in layers)
    calls.clear()
    fast = encoder.encode(prepared)[0]
    assert not calls, "no layer computes its attention alone"
    assert (fast.float() - plain.float()).abs().max() <= 0.03 * plain.float().abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_unfused_layers_run_on_the_attention_kernel(
    family: str,
    tiny_checkpoint: Callable[..., Path],
    calls: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tiny_checkpoint(family, "bfloat16")
    prepared = _prepared(path, (90, 64))
    fused = VisionEncoder.load(path).encode(prepared)[0]
    monkeypatch.setattr("epd.models.encoder.fuse_vision_layers", lambda *_: 0)
    calls.clear()
    alone = VisionEncoder.load(path).encode(prepared)[0]
    assert calls
    assert (fused.float() - alone.float()).abs().max() <= 0.03 * alone.float().abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_picture_has_its_own_bits_beside_others(
    family: str, tiny_checkpoint: Callable[..., Path]
) -> None:
    path = tiny_checkpoint(family, "bfloat16")
    prepared = _prepared(path, (90, 64), (33, 71), (64, 64))
    encoder = VisionEncoder.load(path)
    together = encoder.encode(prepared)
    for image, rows in zip(prepared, together, strict=True):
        assert torch.equal(encoder.encode([image])[0], rows)
    for rows, same in zip(together, _with_two_threads(path, prepared), strict=True):
        assert torch.equal(rows, same)


def _with_two_threads(path: Path, prepared: list[PreparedImage]) -> list[Tensor]:
    before = torch.get_num_threads()
    try:
        return VisionEncoder.load(path, threads=2).encode(prepared)
    finally:
        torch.set_num_threads(before)


def _relu(layer: Any) -> None:
    name = next(name for name, child in layer.mlp.named_children() if "act" in name)
    setattr(layer.mlp, name, nn.ReLU())


def _erf_gelu(layer: Any) -> None:
    name = next(name for name, child in layer.mlp.named_children() if "act" in name)
    setattr(layer.mlp, name, nn.GELU())


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "smolvlm"])
@pytest.mark.parametrize("change", [_relu, _erf_gelu, another_part, another_residual])
def test_a_layer_that_computes_something_else_keeps_its_own_forward(
    family: str, change: Callable[[Any], None], tiny_checkpoint: Callable[..., Path]
) -> None:
    model = _tower(tiny_checkpoint(family, "bfloat16"))
    layers = _layers(model)
    change(layers[1])
    assert LIBRARY is not None
    assert fuse_vision_layers(model, LIBRARY, 1) == len(layers) - 1
    fused = [isinstance(layer.forward, FusedVisionLayer) for layer in layers]
    assert fused == [True, False, True]


def test_a_padded_batch_is_left_to_the_layer(tiny_checkpoint: Callable[..., Path]) -> None:
    model = _tower(tiny_checkpoint("smolvlm", "bfloat16"))
    assert LIBRARY is not None
    layer = _layers(model)[0]
    x = torch.randn(2, 10, 32).bfloat16()
    mask = torch.ones(2, 1, 10, 10, dtype=torch.bool)
    mask[1, :, :, 6:] = False
    wanted = layer(x, attention_mask=mask)
    assert fuse_vision_layers(model, LIBRARY, 1) == 3
    assert torch.equal(layer(x, attention_mask=mask), wanted)
    assert not torch.equal(layer(x, attention_mask=None)[1], wanted[1])


# --- patches


@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (nn.Conv3d(3, 40, (2, 8, 8), (2, 8, 8)), (17, 3, 2, 8, 8)),
        (nn.Conv3d(3, 7, (2, 3, 5), (2, 3, 5), bias=False), (2, 3, 5, 6, 12)),
        (nn.Conv2d(3, 33, 14, 14), (2, 3, 42, 57)),
        (nn.Conv2d(1, 8, 4, 4, padding="valid"), (1, 1, 4, 4)),
    ],
)
def test_patches_are_those_of_the_convolution(layer: nn.Module, size: tuple[int, ...]) -> None:
    assert LIBRARY is not None
    layer.requires_grad_(False).bfloat16()
    x = torch.randn(size, generator=torch.Generator().manual_seed(0)).bfloat16()
    wanted = layer(x)
    assert pack_patches(layer, LinearKernel(LIBRARY, 1)) == 1
    found = layer(x)
    assert found.shape == wanted.shape
    assert (found.float() - wanted.float()).abs().max() <= 0.02 * wanted.float().abs().max()


@pytest.mark.parametrize(
    "layer",
    [
        *(nn.Conv2d(4, 4, 4, 2), nn.Conv2d(4, 4, 4, 4, padding=1), nn.Conv2d(4, 4, 4, 4, groups=2)),
        *(nn.Conv2d(4, 4, 3, 1, padding="same"), nn.Conv2d(4, 4, 2, 2, dilation=2)),
    ],
)
def test_other_convolutions_stay(layer: nn.Module) -> None:
    assert LIBRARY is not None
    assert pack_patches(layer.requires_grad_(False).bfloat16(), LinearKernel(LIBRARY, 1)) == 0


def test_a_float32_convolution_stays() -> None:
    assert LIBRARY is not None
    assert pack_patches(nn.Conv2d(3, 4, 4, 4), LinearKernel(LIBRARY, 1)) == 0


def test_activations_are_told_apart() -> None:
    known: list[nn.Module] = [nn.SiLU(), nn.GELU("tanh"), nn.GELU(), nn.ReLU()]
    layers = [SimpleNamespace(mlp=nn.Sequential(nn.Linear(2, 2), one)) for one in known]
    assert [vision._activation(layer) for layer in layers] == [0, 2, None, None]
