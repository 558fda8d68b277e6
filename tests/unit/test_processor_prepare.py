"""One picture at a time gives the tensors that transformers makes of a whole conversation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from PIL import Image

from epd.models import families
from epd.models.processor import PreparedImage, Processor
from tests.tiny import FAMILIES
from tests.tiny.reference import reference_inputs
from tests.unit.pictures import noise

Tiny = Callable[..., Path]
SIZES = [(72, 40), (48, 64), (50, 50)]


def _conversation(pictures: Sequence[Image.Image]) -> list[dict[str, object]]:
    content: list[dict[str, str]] = []
    for i, _ in enumerate(pictures):
        content += [{"type": "text", "text": f"picture {i}: "}, {"type": "image"}]
    return [{"role": "user", "content": [*content, {"type": "text", "text": " what is it?"}]}]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [1, 3])
def test_tensors_and_placeholders_equal_the_whole_conversations(
    tiny_checkpoint: Tiny, family: str, count: int
) -> None:
    path = tiny_checkpoint(family)
    processor = Processor.load(path)
    pictures = [noise(*size, seed=i) for i, size in enumerate(SIZES[:count])]
    inputs = reference_inputs(path, _conversation(pictures), pictures)
    prepared = [processor.prepare(picture, count) for picture in pictures]
    ids = inputs["input_ids"][0].tolist()
    assert ids.count(processor.image_token_id) == sum(item.rows for item in prepared)
    _assert_same_pixels(family, prepared, inputs)
    if "image_grid_thw" in inputs:
        grids = [tuple(grid) for grid in inputs["image_grid_thw"].tolist()]
        assert [item.grid for item in prepared] == grids


def _assert_same_pixels(family: str, prepared: list[PreparedImage], inputs: object) -> None:
    mine = families.collate(family, prepared)["pixel_values"]
    theirs = inputs["pixel_values"]  # type: ignore[index]
    if family == "llava_onevision":
        theirs = theirs.flatten(0, 1)
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_patches_are_those_that_the_tower_sees(tiny_checkpoint: Tiny, family: str) -> None:
    prepared = Processor.load(tiny_checkpoint(family)).prepare(noise(72, 40))
    pixels = prepared.tensors["pixel_values"]
    area = 8 * 8
    channels = 3 * 2 if "qwen" in family else 3  # Qwen repeats the picture for two frames
    assert prepared.patches == pixels.numel() // (channels * area)


def test_the_picture_decides_the_tensors(tiny_checkpoint: Tiny) -> None:
    for family in FAMILIES:
        processor = Processor.load(tiny_checkpoint(family))
        red, blue = (
            processor.prepare(Image.new("RGB", (40, 40), colour)).tensors["pixel_values"]
            for colour in ("red", "blue")
        )
        assert not torch.equal(red, blue)
