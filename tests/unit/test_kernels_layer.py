"""Fused layers: used for every served family, refused where a layer is another one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from epd.kv.pool import KvPool
from epd.models import attention
from epd.models.checkpoint import load_part
from epd.models.kernels import build
from epd.models.kernels.attention import AttentionKernel
from epd.models.kernels.layer import FusedLayer, fuse_layers
from epd.models.kernels.linear import LinearKernel, pack_linears
from epd.models.lm import LanguageModel
from tests.tiny import FAMILIES
from tests.unit.kernel_layers import another_part, another_residual
from tests.unit.lm_batches import logits_of, two_sequences

LIBRARY = build.load()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="no kernels on this machine")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_served_family_runs_fused_and_equals_torch(
    family: str, tiny_checkpoint: Callable[..., Path]
) -> None:
    path = tiny_checkpoint(family, "bfloat16")
    fast, plain = (LanguageModel.load(path, kernels=kernels) for kernels in ("auto", "off"))
    layers = fast.model.get_decoder().layers
    assert all(isinstance(layer.forward, FusedLayer) for layer in layers)
    assert logits_of(fast).sub(logits_of(plain)).abs().max() < 0.1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("exact", [False, True])
def test_rows_that_nobody_asks_for_change_no_bit(
    family: str, exact: bool, tiny_checkpoint: Callable[..., Path]
) -> None:
    lm = LanguageModel.load(tiny_checkpoint(family, "bfloat16"), exact=exact)
    assert [layer.forward.last for layer in lm.model.get_decoder().layers][-2:] == [False, True]
    pools, logits = [], []
    for select in (range(40), [39, 36, 5], []):
        pools.append(KvPool(lm.kv_layout, 3))
        logits.append(lm.forward(two_sequences(lm, select), pools[-1]))
    assert torch.equal(logits[1], logits[0][[39, 36, 5]])
    assert logits[2].shape == (0, lm.spec.vocab_size)
    for block in range(3):
        views = [pool.block_bytes_view(block) for pool in pools]
        assert torch.equal(views[0], views[1])
        assert torch.equal(views[0], views[2])


def _decoder(path: Path) -> Any:
    assert LIBRARY is not None
    model: Any = load_part(path, "lm", "bfloat16", attn=attention.NAME)
    pack_linears(model, LinearKernel(LIBRARY, 1))
    return model.get_decoder()


def _gelu(layer: Any) -> None:
    layer.mlp.act_fn = nn.GELU()


def _one_plus_weight(layer: Any) -> None:
    norm = layer.input_layernorm
    original = norm.forward
    norm.forward = lambda x: original(x) + x.float().div(x.float().norm()).bfloat16()


def _softcap(layer: Any) -> None:
    original = layer.self_attn.forward
    layer.self_attn.forward = lambda *args, **options: original(*args, **options, softcap=30.0)


@pytest.mark.parametrize(
    "change", [_gelu, _one_plus_weight, another_residual, another_part, _softcap]
)
def test_a_layer_that_computes_something_else_keeps_its_own_forward(
    change: Callable[[Any], None], tiny_checkpoint: Callable[..., Path]
) -> None:
    decoder = _decoder(tiny_checkpoint("qwen2_vl", "bfloat16"))
    assert LIBRARY is not None
    change(decoder.layers[1])
    assert fuse_layers(decoder, LIBRARY, 1) == len(decoder.layers) - 1
    assert not isinstance(decoder.layers[1].forward, FusedLayer)


def test_the_window_is_the_one_that_the_layer_asks_for(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    decoder = _decoder(tiny_checkpoint("qwen2_vl", "bfloat16"))
    assert LIBRARY is not None
    decoder.layers[0].self_attn.sliding_window = 7
    assert fuse_layers(decoder, LIBRARY, 1) == len(decoder.layers)
    assert [layer.forward.struct.window for layer in decoder.layers][:2] == [7, 0]


def test_attention_kernel_alone_where_layers_are_not_fused(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_checkpoint("qwen2_vl", "bfloat16")
    monkeypatch.setattr("epd.models.lm.fuse_layers", lambda *_: 0)
    calls = []
    original = AttentionKernel.__call__

    def count(self: AttentionKernel, *args: Any) -> torch.Tensor:
        calls.append(1)
        return original(self, *args)

    monkeypatch.setattr(AttentionKernel, "__call__", count)
    unfused, plain = (LanguageModel.load(path, kernels=kernels) for kernels in ("auto", "off"))
    assert logits_of(unfused).sub(logits_of(plain)).abs().max() < 0.1
    assert len(calls) == len(unfused.model.get_decoder().layers)
