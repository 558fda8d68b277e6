"""What is planned from a size is what processor and encoder make of a picture of that size."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from epd.errors import EpdError, ErrorKind
from epd.models import families
from epd.models.encoder import VisionEncoder
from epd.models.processor import Processor
from tests.tiny import FAMILIES

Tiny = Callable[..., Path]

ODD_SIZES = [
    (1, 1),
    (1, 2),
    (1, 199),
    (200, 1),
    (27, 257),
    (257, 27),
    (28, 28),
    (29, 55),
    (400, 800),
    (800, 400),
    (1344, 1000),
    (4000, 31),
]


@lru_cache(maxsize=len(FAMILIES))
def _loaded(path: Path) -> tuple[Processor, VisionEncoder]:
    return Processor.load(path), VisionEncoder.load(path)


def _check(path: Path, width: int, height: int, images: int) -> None:
    processor, encoder = _loaded(path)
    plan = processor.plan(width, height, images)
    prepared = processor.prepare(Image.new("RGB", (width, height), (200, 30, 90)), images)
    assert (plan.rows, plan.grid) == (prepared.rows, prepared.grid)
    ids = processor.tokenizer(plan.replacement, add_special_tokens=False)["input_ids"]
    assert ids.count(processor.image_token_id) == plan.rows > 0
    (embedding,) = encoder.encode([prepared])
    assert embedding.shape == (encoder.planes, plan.rows, encoder.hidden)
    assert torch.isfinite(embedding).all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("images", [1, 3])
def test_odd_sizes(tiny_checkpoint: Tiny, family: str, images: int) -> None:
    for width, height in ODD_SIZES:
        _check(tiny_checkpoint(family), width, height, images)


@pytest.mark.parametrize("family", FAMILIES)
def test_any_size(tiny_checkpoint: Tiny, family: str) -> None:
    path = tiny_checkpoint(family)

    @settings(max_examples=25, deadline=None)
    @given(st.integers(1, 900), st.integers(1, 900), st.integers(1, 2))
    def check(width: int, height: int, images: int) -> None:
        if max(width, height) <= 200 * min(width, height):
            _check(path, width, height, images)

    check()


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_a_size_that_the_processor_refuses(tiny_checkpoint: Tiny, family: str) -> None:
    processor, _ = _loaded(tiny_checkpoint(family))
    for refuse in (
        lambda: processor.plan(201, 1),
        lambda: processor.prepare(Image.new("RGB", (201, 1))),
    ):
        with pytest.raises(EpdError) as caught:
            refuse()
        assert caught.value.kind is ErrorKind.INVALID_IMAGE
        assert "201 x 1" in caught.value.message
        assert "aspect ratio" in caught.value.message


@pytest.mark.parametrize("family", FAMILIES)
def test_computed_grid_equals_that_of_a_blank_picture(
    tiny_checkpoint: Tiny, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_checkpoint(family)
    fast = Processor.load(path)
    sizes = [*ODD_SIZES, (33, 70), (129, 130), (640, 427), (451, 300)]
    planned = [fast.plan(*size) for size in sizes]
    monkeypatch.setattr(families, "grid_of_size", lambda *_: None)
    slow = Processor.load(path)
    assert planned == [slow.plan(*size) for size in sizes]


def test_a_remembered_size_is_not_computed_again(
    tiny_checkpoint: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = Processor.load(tiny_checkpoint("llava_onevision"))
    calls = []
    original = processor.hf._process_images

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        return original(*arguments, **options)

    monkeypatch.setattr(processor.hf, "_process_images", counted)
    for images in (1, 1, 2, 3, 1):
        processor.plan(60, 40, images)
    assert len(calls) == 2  # lone, one of several


def test_llava_onevision_tiles_a_lone_picture_only(tiny_checkpoint: Tiny) -> None:
    processor, _ = _loaded(tiny_checkpoint("llava_onevision"))
    lone, several = processor.plan(100, 60, 1), processor.plan(100, 60, 2)
    assert several.rows == 16 + 1  # one tile and a newline
    assert lone.rows > several.rows


@pytest.mark.parametrize("family", FAMILIES)
def test_threads_get_what_one_thread_gets(tiny_checkpoint: Tiny, family: str) -> None:
    processor, _ = _loaded(tiny_checkpoint(family))
    sizes = [(20 + 7 * i, 90 - 3 * i) for i in range(16)] * 3
    pictures = [Image.new("RGB", size, (i, 2 * i, 3 * i)) for i, size in enumerate(sizes)]
    alone = [processor.prepare(picture) for picture in pictures]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(processor.prepare, pictures))
    for one, other in zip(alone, together, strict=True):
        assert (one.rows, one.grid, one.patches) == (other.rows, other.grid, other.patches)
        for name, tensor in one.tensors.items():
            assert torch.equal(tensor, other.tensors[name]), name


def test_config_digest_follows_the_image_config(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    path = tiny_checkpoint("qwen2_vl")
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    digest = Processor.load(copy).config_digest
    assert digest == Processor.load(path).config_digest
    assert len(digest) == 32
    file = copy / "preprocessor_config.json"
    file.write_text(file.read_text().replace('"merge_size": 2', '"merge_size": 2 '))
    assert Processor.load(copy).config_digest != digest


def test_missing_tokenizer(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_checkpoint("qwen2_vl"), tmp_path / "copy"))
    (copy / "tokenizer.json").unlink()
    with pytest.raises(EpdError, match="no tokenizer"):
        Processor.load(copy)


def test_tokenizer_without_the_image_token(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_checkpoint("qwen2_vl"), tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "image_token_id": 9999}))
    with pytest.raises(EpdError, match="no token 9999"):
        Processor.load(copy)
