"""What differs between model families and can't be asked of the model itself.

Everything else is generic. A family is served once it is in `PROVEN`: its
tokens and logits were compared with transformers' own `generate()`. A family
that can't work, or was not compared, is refused at load with the reason, since
a wrong answer would look like a right one.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

PROVEN = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_onevision", "idefics3", "smolvlm"})
"""`model_type` of the families with parity tests."""

LONE_IMAGE_IS_TILED = frozenset({"llava_onevision"})
"""Tiles an image only when it is the single one of its request (`need_patching =
[n == 1 for n in batch_num_images ...]` in its image processor and model), so that
the same picture has other rows beside a second picture."""

_REFUSED = {
    "mllama": "its images enter through cross-attention, which the paged cache does not hold",
    "paligemma": "its whole prompt attends in both directions, which chunked prefill breaks",
    "paligemma2": "its whole prompt attends in both directions, which chunked prefill breaks",
    "gemma3": "its image tokens attend in both directions, which chunked prefill breaks",
    "gemma4": "its image tokens attend in both directions, which chunked prefill breaks",
}
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


LONE, ONE_OF_SEVERAL = 1, 2

_TILES_ON_AXIS_1 = frozenset({"idefics3", "smolvlm"})
"""pixel_values [requests, tiles, ...]; the tiles of several pictures make one request."""


class Prepared(Protocol):
    """What collating needs of a `PreparedImage`."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]: ...
    @property
    def image_key(self) -> int: ...


def image_key(family: str, images_in_request: int) -> int:
    """What of the number of images a picture's rows depend on; equal keys, equal rows.

    0 where the number does not matter; else LONE or ONE_OF_SEVERAL.
    """
    if family not in LONE_IMAGE_IS_TILED:
        return 0
    return LONE if images_in_request <= 1 else ONE_OF_SEVERAL


def grid_of_size(image_processor: Any, width: int, height: int) -> tuple[int, int, int] | None:
    """Patch grid (t, h, w) by the image processor's own rule, or None where it has no rule.

    Qwen's makes up to 300 MB of patches of a blank picture only to count them.

    Raises:
        ValueError: the processor takes no picture of this size.
    """
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as qwen

    if type(image_processor) is not qwen.Qwen2VLImageProcessorPil or not image_processor.do_resize:
        return None
    patch, size = image_processor.patch_size, image_processor.size
    resized_height, resized_width = qwen.smart_resize(
        height,
        width,
        factor=patch * image_processor.merge_size,
        min_pixels=size["shortest_edge"],
        max_pixels=size["longest_edge"],
    )
    return 1, resized_height // patch, resized_width // patch


def batch_order(family: str, images: Sequence[Prepared]) -> list[int]:
    """Order in which pictures enter one forward: `collate` needs the lone ones first."""
    if family not in LONE_IMAGE_IS_TILED:
        return list(range(len(images)))
    return sorted(range(len(images)), key=lambda i: images[i].image_key)


def collate(family: str, images: Sequence[Prepared]) -> dict[str, torch.Tensor]:
    """Arguments of get_image_features for several pictures, in `batch_order`."""
    if family in LONE_IMAGE_IS_TILED:
        return _collate_lone_tiled(images)
    import torch  # here: a gateway reads this file's facts and has no use for torch

    axis = 1 if family in _TILES_ON_AXIS_1 else 0
    names = images[0].tensors
    return {name: torch.cat([i.tensors[name] for i in images], axis) for name in names}


def _collate_lone_tiled(images: Sequence[Prepared]) -> dict[str, torch.Tensor]:
    """LLaVA-OneVision: tiles of all pictures in one list, and which are tiled.

    The model tiles where `batch_num_images` is 1 and repeats other counts, then pairs
    that list with the pictures by zip(): one count that covers all pictures of several,
    at the end, says "not tiled" for each of them.
    """
    import torch

    lone = sum(image.image_key == LONE for image in images)
    counts = [1] * lone + ([max(2, len(images) - lone)] if lone < len(images) else [])
    return {
        "pixel_values": torch.cat(
            [image.tensors["pixel_values"].flatten(0, 1) for image in images]
        ),
        "image_sizes": torch.cat([image.tensors["image_sizes"] for image in images]),
        "batch_num_images": torch.tensor(counts),
    }


def refusal(config: Any, model_class: Any) -> str | None:
    """Why this model can't be served, or None.

    `config` is a transformers `PretrainedConfig`; `model_class` its image-text-to-text
    class, or None where transformers has none.
    """
    family = config.model_type
    if family in _REFUSED:
        return _REFUSED[family]
    if model_class is None:
        return "transformers has no image-text-to-text model for it"
    return _structural(config, model_class) or _unproven(family)


def _structural(config: Any, model_class: Any) -> str | None:
    text = config.get_text_config()
    if config.is_encoder_decoder:
        return "it is an encoder-decoder model"
    others = set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES
    if others:
        return f"it has {', '.join(sorted(others))} layers; only attention has a paged cache"
    if not model_class._supports_attention_backend:
        return "its attention can't be replaced by the paged one"
    if "mm_encoder_outputs" not in inspect.signature(model_class.forward).parameters:
        return "it does not take image embeddings made elsewhere"
    rope = _rope_types(getattr(text, "rope_parameters", None))
    if bad := rope & _BATCH_DEPENDENT_ROPE:
        return f"its {min(bad)} RoPE depends on the longest sequence of the batch"
    return None


def _rope_types(parameters: Any) -> set[str]:
    """RoPE types of all layers; the parameters are one dict, or one for each layer type."""
    if not isinstance(parameters, dict):
        return set()
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(p["rope_type"]) for p in [parameters, *nested] if "rope_type" in p}


def unserved(family: str) -> str | None:
    """Why no model of this family can be served, by its name alone, or None."""
    return _REFUSED.get(family) or _unproven(family)


def _unproven(family: str) -> str | None:
    if family in PROVEN:
        return None
    return f"it was not compared with transformers yet; compared: {', '.join(sorted(PROVEN))}"
