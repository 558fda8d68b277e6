"""Vision towers on the attention kernel: the same rows, and SDPA wherever it can't run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from epd.models.encoder import VisionEncoder
from epd.models.kernels import build
from epd.models.kernels.attention import AttentionKernel
from epd.models.kernels.linear import PackedLinear
from epd.models.processor import Processor
from epd.models.vision_attention import vision_attention
from tests.tiny import FAMILIES

LIBRARY = build.load()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="no kernels on this machine")
MODULE: Any = SimpleNamespace(is_causal=False, training=False)


def _random(batch: int, tokens: int, heads: int, dim: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    made = [torch.randn(batch, tokens, heads, dim, generator=generator) for _ in range(3)]
    return [x.bfloat16().transpose(1, 2) for x in made]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of patches of each call of the kernel."""
    seen: list[int] = []
    original = AttentionKernel.dense

    def record(self: AttentionKernel, query: Tensor, *args: Any) -> Tensor:
        seen.append(query.shape[2])
        return original(self, query, *args)

    monkeypatch.setattr(AttentionKernel, "dense", record)
    return seen


@pytest.mark.parametrize("shape", [(1, 50, 4, 64), (3, 33, 2, 80), (2, 100, 3, 10), (1, 1, 1, 16)])
def test_every_patch_sees_its_whole_picture(shape: tuple[int, ...], calls: list[int]) -> None:
    q, k, v = _random(*shape)
    out, _ = vision_attention(MODULE, q, k, v, None, scaling=0.3)
    wanted = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=0.3)
    assert calls
    assert torch.allclose(out.double(), wanted.transpose(1, 2), atol=8e-3, rtol=8e-3)
    alone, _ = vision_attention(MODULE, q[-1:], k[-1:], v[-1:], None, scaling=0.3)
    assert torch.equal(alone[0], out[-1]), "a picture's bits are its own"


@pytest.mark.parametrize(
    "options", [{"is_causal": True}, {"mask": True}, {"dtype": torch.float32}], ids=str
)
def test_what_the_kernel_does_not_know_is_left_to_torch(
    options: dict[str, Any], calls: list[int]
) -> None:
    q, k, v = (x.to(options.get("dtype", torch.bfloat16)) for x in _random(1, 20, 2, 16))
    mask = torch.ones(1, 1, 20, 20).tril().bool() if "mask" in options else None
    causal = options.get("is_causal", False)
    out, _ = vision_attention(MODULE, q, k, v, mask, is_causal=causal)
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    assert not calls
    assert torch.allclose(out, wanted.transpose(1, 2), atol=8e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_every_served_family(
    family: str, tiny_checkpoint: Callable[..., Path], calls: list[int]
) -> None:
    path = tiny_checkpoint(family, "bfloat16")
    image = Image.effect_noise((90, 64), 80).convert("RGB")
    prepared = Processor.load(path).prepare(image, 1)
    plain = VisionEncoder.load(path, kernels="off").encode([prepared])[0]
    assert not calls
    encoder = VisionEncoder.load(path)
    linears = [module for module in encoder._model.modules() if type(module) is torch.nn.Linear]
    assert linears
    assert all(isinstance(linear.forward, PackedLinear) for linear in linears)
    fast = encoder.encode([prepared])[0]
    assert calls, "the kernel runs"
    assert (fast.float() - plain.float()).abs().max() <= 0.03 * plain.float().abs().max()
