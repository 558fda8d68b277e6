"""All layers in one call: the same bits as one by one, and only where nothing is in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from epd.kv.pool import KvPool
from epd.models.kernels import build
from epd.models.kernels.stack import Stack, stack_layers
from epd.models.lm import ForwardBatch, LanguageModel, SequenceSlice
from tests.tiny import FAMILIES
from tests.unit.lm_batches import CACHED, TABLES, filled_pool

pytestmark = pytest.mark.skipif(build.load() is None, reason="no kernels on this machine")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each call of a stack."""
    made: list[int] = []
    original = Stack.__call__

    def count(self: Stack, x: torch.Tensor, *args: Any) -> torch.Tensor:
        made.append(x.shape[1])
        return original(self, x, *args)

    monkeypatch.setattr(Stack, "__call__", count)
    return made


def _decoded(lm: LanguageModel, select: list[int]) -> tuple[torch.Tensor, KvPool]:
    """Three sequences, the second with two new tokens."""
    pool = filled_pool(lm)
    news = (1, 2, 1)
    parts = [lm.continuation(cached, n, 0) for cached, n in zip(CACHED, news, strict=True)]
    sequences = [
        SequenceSlice(n, cached + n, table)
        for n, cached, table in zip(news, CACHED, TABLES, strict=True)
    ]
    ids = torch.tensor([50, 60, 61, 70])
    return lm.forward(ForwardBatch(ids, torch.cat(parts, 1), sequences, select), pool), pool


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("exact", [False, True])
def test_in_one_call_and_one_by_one_are_the_same_bits(
    family: str, exact: bool, tiny_checkpoint: Callable[..., Path], calls: list[int]
) -> None:
    lm = LanguageModel.load(tiny_checkpoint(family, "bfloat16"), exact=exact)
    assert lm._whole_rows
    for select in ([0, 1, 2, 3], [0, 2]):
        calls.clear()
        whole, filled = _decoded(lm, select)
        assert calls, "the stack ran"
        calls.clear()
        rows, lm._whole_rows = lm._whole_rows, 0
        apart, other = _decoded(lm, select)
        lm._whole_rows = rows
        assert not calls
        assert torch.equal(whole, apart)
        for block in range(6):
            assert torch.equal(filled.block_bytes_view(block), other.block_bytes_view(block))


def test_int8_weights_run_in_one_call_too(
    tiny_checkpoint: Callable[..., Path], calls: list[int]
) -> None:
    lm = LanguageModel.load(tiny_checkpoint("qwen2_vl", "bfloat16"), quantize="int8")
    whole, _ = _decoded(lm, [0, 1, 2, 3])
    assert calls
    lm._whole_rows = 0
    assert torch.equal(whole, _decoded(lm, [0, 1, 2, 3])[0])


def test_where_something_happens_between_layers_they_stay_apart(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, calls: list[int]
) -> None:
    def with_a_hook(decoder: Any, *args: Any) -> Stack | None:
        hook = lambda layer, args: (args[0] * 1.5, *args[1:])  # noqa: E731
        decoder.layers[1].register_forward_pre_hook(hook)
        return stack_layers(decoder, *args)

    monkeypatch.setattr("epd.models.lm.stack_layers", with_a_hook)
    lm = LanguageModel.load(tiny_checkpoint("qwen2_vl", "bfloat16"))
    assert lm._whole_rows == 0
    calls.clear()
    _decoded(lm, [0])
    assert not calls


def test_pictures_rows_go_layer_by_layer(
    tiny_checkpoint: Callable[..., Path], calls: list[int]
) -> None:
    """Models may add more of them behind the first layers."""
    lm = LanguageModel.load(tiny_checkpoint("qwen3_vl", "bfloat16"))
    image = lm.spec.image_token_id
    ids = torch.tensor([20, image, image, 21])
    pool = KvPool(lm.kv_layout, 1)
    rows = torch.ones(lm.spec.planes, 2, lm.spec.hidden, dtype=torch.bfloat16)
    sequence = SequenceSlice(4, 4, [0], image_rows=2)
    calls.clear()
    lm.forward(ForwardBatch(ids, lm.continuation(0, 4, 0), [sequence], [3], rows), pool)
    assert not calls
    words = SequenceSlice(4, 4, [0])
    lm.forward(ForwardBatch(ids, lm.continuation(0, 4, 0), [words], [3]), pool)
    assert calls == [4], "a placeholder that was generated is a word"


def test_another_pool_is_another_place(tiny_checkpoint: Callable[..., Path]) -> None:
    lm = LanguageModel.load(tiny_checkpoint("qwen2_vl", "bfloat16"))
    first, second = _decoded(lm, [0]), _decoded(lm, [0])
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1].block_bytes_view(2), second[1].block_bytes_view(2))
