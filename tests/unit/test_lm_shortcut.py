"""Decode without the model's own Python: the same bits, and only where it is the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from epd.kv.pool import KvPool
from epd.models.kernels import build
from epd.models.lm import Decoded, DecodeRow, LanguageModel
from epd.models.shortcut import Shortcut
from tests.tiny import FAMILIES
from tests.unit.lm_batches import CACHED, TABLES, filled_pool

pytestmark = pytest.mark.skipif(build.load() is None, reason="no kernels on this machine")


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each step that went by the shortcut."""
    made: list[int] = []
    original = Shortcut.__call__

    def count(
        self: Shortcut, rows: list[DecodeRow], pool: KvPool, begin: Callable[[], None]
    ) -> Decoded:
        made.append(len(rows))
        return original(self, rows, pool, begin)

    monkeypatch.setattr(Shortcut, "__call__", count)
    return made


def _rows(lm: LanguageModel, ids: tuple[int, ...] = (50, 60, 70)) -> list[DecodeRow]:
    delta = 5 if lm.continuation(0, 1, 5).shape[0] > 1 else 0
    return [
        DecodeRow(token, cached + 1, delta, table)
        for token, cached, table in zip(ids, CACHED, TABLES, strict=True)
    ]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("exact", [False, True])
def test_the_same_bits_as_by_the_models_forward(
    family: str, exact: bool, tiny_checkpoint: Callable[..., Path], taken: list[int]
) -> None:
    lm = LanguageModel.load(tiny_checkpoint(family, "bfloat16"), exact=exact)
    pools, rows = (filled_pool(lm), filled_pool(lm)), _rows(lm)
    taken.clear()
    begun: list[int] = []
    found, best = lm.decode(rows, pools[0], lambda: begun.append(1))
    assert taken == [3]
    assert begun == [1]
    with torch.inference_mode():
        wanted = lm._decode_by_forward(rows, pools[1])
    assert torch.equal(found.float(), wanted)
    assert best == wanted.argmax(-1).tolist()
    assert torch.equal(pools[0].bytes, pools[1].bytes)


def test_a_placeholder_that_was_generated_goes_by_the_models_forward(
    tiny_checkpoint: Callable[..., Path], taken: list[int]
) -> None:
    lm = LanguageModel.load(tiny_checkpoint("qwen2_vl", "bfloat16"))
    taken.clear()
    begun: list[int] = []
    rows = _rows(lm, (50, lm.spec.image_token_id, 70))
    assert lm.decode(rows, filled_pool(lm), lambda: begun.append(1)).logits.isfinite().all()
    assert not taken
    assert begun == [1]


def test_a_model_that_does_more_keeps_its_own_forward(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, taken: list[int]
) -> None:
    """Here: one that scales its logits."""
    forward = LanguageModel._run

    def scaled(self: LanguageModel, *args: object) -> torch.Tensor:
        return forward(self, *args) * 0.5  # type: ignore[arg-type]

    monkeypatch.setattr(LanguageModel, "_run", scaled)
    lm = LanguageModel.load(tiny_checkpoint("qwen2_vl", "bfloat16"))
    taken.clear()
    assert lm.decode(_rows(lm), filled_pool(lm)).best is None
    assert not taken


def test_positions_far_away_are_made_when_they_come(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, taken: list[int]
) -> None:
    monkeypatch.setattr("epd.models.shortcut._LEAST_POSITIONS", 64)
    lm = LanguageModel.load(tiny_checkpoint("qwen2_vl", "bfloat16"))
    pools = KvPool(lm.kv_layout, 1), KvPool(lm.kv_layout, 1)
    for kv_len in (60, 70, 3000):
        row = DecodeRow(50, kv_len, 1000, [0] * lm.kv_layout.blocks_for(kv_len))
        found = lm.decode([row], pools[0]).logits.float()
        with torch.inference_mode():
            assert torch.equal(found, lm._decode_by_forward([row], pools[1]))
    assert taken[-3:] == [1, 1, 1]


@pytest.mark.parametrize("delta", [-10, 5000, 2**31 - 1, -(2**31)])
def test_a_position_that_the_model_has_not_goes_by_its_forward(
    delta: int, tiny_checkpoint: Callable[..., Path], taken: list[int]
) -> None:
    """Another process says the delta."""
    lm = LanguageModel.load(tiny_checkpoint("qwen2_vl", "bfloat16"))
    taken.clear()
    row = DecodeRow(50, 9, delta, [0] * lm.kv_layout.blocks_for(9))
    assert lm.decode([row], KvPool(lm.kv_layout, 1)).logits.isfinite().all()
    assert not taken


def test_int8_weights_too(tiny_checkpoint: Callable[..., Path], taken: list[int]) -> None:
    lm = LanguageModel.load(tiny_checkpoint("qwen2_vl", "bfloat16"), quantize="int8")
    pools, rows = (filled_pool(lm), filled_pool(lm)), _rows(lm)
    taken.clear()
    found = lm.decode(rows, pools[0]).logits.float()
    assert taken == [3]
    with torch.inference_mode():
        assert torch.equal(found, lm._decode_by_forward(rows, pools[1]))


def test_a_step_is_reported(tiny_checkpoint: Callable[..., Path]) -> None:
    lm = LanguageModel.load(tiny_checkpoint("qwen2_vl", "bfloat16"))
    parts: list[int] = []
    lm.report_layers(lambda: parts.append(1))
    lm.decode(_rows(lm), filled_pool(lm))
    assert parts
