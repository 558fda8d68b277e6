"""Embeddings equal the model's own, whatever a picture is batched with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from epd.errors import EpdError, ErrorKind
from epd.models.encoder import VisionEncoder
from epd.models.processor import PreparedImage, Processor
from tests.tiny import FAMILIES
from tests.tiny.reference import load_reference, reference_inputs
from tests.unit.pictures import noise

Tiny = Callable[..., Path]
SIZES = [(72, 40), (48, 64), (50, 50), (1, 1), (257, 27), (130, 200)]


def _reference_rows(path: Path, encoder: VisionEncoder, count: int) -> list[torch.Tensor]:
    """[rows, hidden] for each plane, of `count` pictures in one request, by the whole model."""
    pictures = [noise(*size, seed=i) for i, size in enumerate(SIZES[:count])]
    message = {"role": "user", "content": [{"type": "image"}] * count}
    inputs = reference_inputs(path, [message], pictures)
    model, _ = load_reference(path)
    arguments = {name: value for name, value in inputs.items() if name in encoder._arguments}
    with torch.no_grad():
        output = model.base_model.get_image_features(**arguments, return_dict=True)
    planes = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
    return [_flat(plane) for plane in planes]


def _flat(plane: Any) -> torch.Tensor:
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in plane])


def _prepared(path: Path, images_in_request: int) -> list[PreparedImage]:
    processor = Processor.load(path)
    return [
        processor.prepare(noise(*size, seed=i), images_in_request) for i, size in enumerate(SIZES)
    ]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [1, 3, 6])
def test_equals_the_whole_models_features(tiny_checkpoint: Tiny, family: str, count: int) -> None:
    path = tiny_checkpoint(family)
    encoder = VisionEncoder.load(path)
    results = encoder.encode(_prepared(path, count)[:count])
    reference = _reference_rows(path, encoder, count)
    assert len(reference) == encoder.planes
    for plane, expected in enumerate(reference):
        mine = torch.cat([result[plane] for result in results])
        assert mine.shape == expected.shape
        assert (mine - expected).abs().max() < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_lone_pictures_and_pictures_of_several_share_a_forward(
    tiny_checkpoint: Tiny, family: str
) -> None:
    path = tiny_checkpoint(family)
    encoder = VisionEncoder.load(path)
    mixed = [
        image for pair in zip(_prepared(path, 1), _prepared(path, 4), strict=True) for image in pair
    ]
    together = encoder.encode(mixed)
    for image, result in zip(mixed, together, strict=True):
        (alone,) = encoder.encode([image])
        assert result.shape == alone.shape == (encoder.planes, image.rows, encoder.hidden)
        assert (result - alone).abs().max() < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_exact_mode_has_the_same_bits_in_any_batch(
    tiny_checkpoint: Tiny, family: str, dtype: str
) -> None:
    path = tiny_checkpoint(family)
    encoder = VisionEncoder.load(path, dtype, exact=True)
    images = _prepared(path, 1)
    alone = [encoder.encode([image])[0] for image in images]
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1], [2, 2, 4, 0, 1]):
        for index, result in zip(order, encoder.encode([images[i] for i in order]), strict=True):
            assert torch.equal(result, alone[index])


@pytest.mark.parametrize("exact", [False, True])
def test_forwards_are_shared_except_in_exact_mode(tiny_checkpoint: Tiny, exact: bool) -> None:
    """Here a shared forward may give the same bits; elsewhere it may not, so count them."""
    path = tiny_checkpoint("qwen3_vl")
    encoder = VisionEncoder.load(path, "bfloat16", exact=exact)
    forwards = []
    encoder._model.base_model.visual.register_forward_hook(lambda *_: forwards.append(1))
    encoder.encode(_prepared(path, 1))
    assert len(forwards) == (len(SIZES) if exact else 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_results_own_their_memory(tiny_checkpoint: Tiny, family: str) -> None:
    path = tiny_checkpoint(family)
    encoder = VisionEncoder.load(path, "bfloat16")
    for result in encoder.encode(_prepared(path, 1)):
        assert result.is_contiguous()
        assert result.dtype == torch.bfloat16
        assert result.untyped_storage().nbytes() == result.numel() * result.element_size()
        assert not result.requires_grad


def test_nothing_to_encode(tiny_checkpoint: Tiny) -> None:
    for exact in (False, True):
        assert VisionEncoder.load(tiny_checkpoint("qwen3_vl"), exact=exact).encode([]) == []


def test_another_picture_has_other_rows(tiny_checkpoint: Tiny) -> None:
    for family in FAMILIES:
        path = tiny_checkpoint(family)
        processor, encoder = Processor.load(path), VisionEncoder.load(path)
        one, other = encoder.encode([processor.prepare(noise(50, 50, seed)) for seed in (1, 2)])
        assert (one - other).abs().max() > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_holds_the_vision_part_only(tiny_checkpoint: Tiny, family: str) -> None:
    path = tiny_checkpoint(family)
    names = [name for name, _ in VisionEncoder.load(path).parameters()]
    assert names
    assert not [n for n in names if "language_model" in n or "text_model" in n or "lm_head" in n]


def test_row_counts_that_disagree_are_refused(tiny_checkpoint: Tiny) -> None:
    path = tiny_checkpoint("qwen2_vl")
    image = Processor.load(path).prepare(noise(50, 50))
    with pytest.raises(EpdError) as caught:
        VisionEncoder.load(path).encode([replace(image, rows=image.rows + 1)])
    assert caught.value.kind is ErrorKind.INVALID_IMAGE


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_of_the_tower_reports(tiny_checkpoint: Tiny, family: str) -> None:
    path = tiny_checkpoint(family)
    encoder = VisionEncoder.load(path)
    done: list[int] = []
    encoder.report_layers(lambda: done.append(1))
    encoder.encode(_prepared(path, 1)[:1])
    vision = encoder._model.config.vision_config
    depth = getattr(vision, "depth", None) or vision.num_hidden_layers
    assert len(done) >= depth
