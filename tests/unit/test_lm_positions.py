"""Positions travel with the request: prompt, generated ids, failover."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from epd.errors import EpdError
from epd.jobs import ImageItem
from epd.kv.pool import KvPool
from epd.models.lm import ForwardBatch, LanguageModel, SequenceSlice


def _item(rows: int, grid: tuple[int, ...]) -> ImageItem:
    return ImageItem(0, b"d" * 32, rows, grid, 1, 1, 1)


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen3_vl", "llava_onevision"])
def lm(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> LanguageModel:
    return LanguageModel.load(tiny_checkpoint(request.param))


def _prompt(lm: LanguageModel) -> tuple[list[int], list[ImageItem]]:
    image = lm.spec.image_token_id
    items = [_item(6, (1, 4, 6)), _item(2, (1, 2, 4))]
    if lm.spec.family == "llava_onevision":
        items = [_item(6, ()), _item(2, ())]
    return [1, 2, *[image] * 6, 3, *[image] * 2, 4, 5], items


def test_mrope_rows_are_the_documented_ones(tiny_checkpoint: Callable[..., Path]) -> None:
    lm = LanguageModel.load(tiny_checkpoint("qwen2_vl"))
    ids, items = _prompt(lm)
    rows, delta = lm.positions(torch.tensor(ids), items, len(ids))
    assert rows.tolist() == [
        [*range(13)],
        [0, 1, *[2] * 6, 5, 6, 6, 8, 9],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 6, 8, 9],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 9],
    ]
    assert delta == -3


def test_generated_ids_go_on_where_decode_would(lm: LanguageModel) -> None:
    ids, items = _prompt(lm)
    rows, delta = lm.positions(torch.tensor(ids), items, len(ids))
    # Another image id among them is an ordinary token.
    generated = [7, lm.spec.image_token_id, 8]
    again, same = lm.positions(torch.tensor(ids + generated), items, len(ids))
    assert same == delta
    assert torch.equal(again[:, : len(ids)], rows)
    assert torch.equal(again[:, len(ids) :], lm.continuation(len(ids), 3, delta))
    assert again[0].tolist() == list(range(len(ids) + 3))
    if len(rows) == 4:
        assert (again[1:, len(ids)] == rows[1:].max() + 1).all()


def test_text_only_positions_are_plain(lm: LanguageModel) -> None:
    rows, delta = lm.positions(torch.arange(1, 10), [], 7)
    assert delta == 0
    assert (rows == torch.arange(9)).all()
    assert len(rows) == len(lm.continuation(0, 1, 0))


def test_requests_do_not_leak_into_each_other(lm: LanguageModel) -> None:
    """The model keeps the last delta on itself; nothing of it is used."""
    ids, items = _prompt(lm)
    first = lm.positions(torch.tensor(ids), items, len(ids))
    lm.positions(torch.arange(1, 6), [], 5)
    second = lm.positions(torch.tensor(ids), items, len(ids))
    assert torch.equal(first[0], second[0])
    assert first[1] == second[1]


def test_rows_and_placeholders_must_match(lm: LanguageModel) -> None:
    ids, items = _prompt(lm)
    with pytest.raises(EpdError, match="8 image placeholders for 6") as raised:
        lm.positions(torch.tensor(ids), items[:1], len(ids))
    assert raised.value.param == "items"


HUGE = 4_000_000_000


@pytest.mark.parametrize(
    "grid",
    [
        *[(), (1, 4), (1, 4, 4), (1, 8, 8), (0, 0, 0), (1, 5, 7)],
        *[(1, HUGE, HUGE), (HUGE, 2, 2), (1, 2, HUGE)],
    ],
    ids=str,
)
def test_grids_must_fit_their_rows(
    tiny_checkpoint: Callable[..., Path], grid: tuple[int, ...]
) -> None:
    lm = LanguageModel.load(tiny_checkpoint("qwen3_vl"))
    ids = [1, *[lm.spec.image_token_id] * 6, 2]
    with pytest.raises(EpdError) as raised:
        lm.positions(torch.tensor(ids), [_item(6, grid)], len(ids))
    assert raised.value.param == "items"


@pytest.mark.parametrize(
    ("runs", "items"),
    [
        ((6, 2), [(6, (1, 2, 4)), (2, (1, 4, 6))]),
        ((6, 2), [(2, (1, 2, 4)), (6, (1, 4, 6))]),
        ((8,), [(6, (1, 4, 6)), (2, (1, 2, 4))]),
        ((3, 3), [(6, (1, 4, 6))]),
    ],
    ids=["grids changed places", "images changed places", "without a token between", "cut in two"],
)
def test_every_run_of_placeholders_is_one_image(
    tiny_checkpoint: Callable[..., Path],
    runs: tuple[int, ...],
    items: list[tuple[int, tuple[int, ...]]],
) -> None:
    """The sums are right, so that transformers takes the wrong ones for right."""
    lm = LanguageModel.load(tiny_checkpoint("qwen2_vl"))
    ids = [1]
    for run in runs:
        ids += [*[lm.spec.image_token_id] * run, 2]
    with pytest.raises(EpdError) as raised:
        lm.positions(torch.tensor(ids), [_item(*item) for item in items], len(ids))
    assert raised.value.param == "items"


def test_numerics_id_names_what_bits_depend_on(tiny_checkpoint: Callable[..., Path]) -> None:
    path = tiny_checkpoint("qwen3_vl")
    plain, exact = (LanguageModel.load(path, exact=exact).numerics_id for exact in (False, True))
    assert plain != exact
    assert "float32" in plain
    assert "threads=1" in plain
    assert torch.__version__ in plain


def test_no_vision_weight_is_held(lm: LanguageModel) -> None:
    names = [name for name, _ in lm.model.named_parameters()]
    assert names
    assert not [name for name in names if "vis" in name or "projector" in name]


def test_every_layer_reports(lm: LanguageModel) -> None:
    done: list[int] = []
    lm.report_layers(lambda: done.append(1))
    pool = KvPool(lm.kv_layout, 1)
    positions, sequences = lm.continuation(0, 3, 0), [SequenceSlice(3, 3, [0])]
    lm.forward(ForwardBatch(torch.tensor([3, 4, 5]), positions, sequences, [2]), pool)
    assert len(done) == lm.model.config.get_text_config().num_hidden_layers
