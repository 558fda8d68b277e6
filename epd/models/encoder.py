"""The vision tower and projector: prepared pictures in, embedding rows out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from epd.errors import EpdError, ErrorKind
from epd.models import families, vision_attention
from epd.models.backends import usable_device
from epd.models.checkpoint import load_part, weights_bytes
from epd.models.kernels import build
from epd.models.kernels.linear import LinearKernel, pack_linears
from epd.models.kernels.patches import pack_patches
from epd.models.kernels.vision import fuse_vision_layers
from epd.models.processor import PreparedImage
from epd.models.progress import report_layers
from epd.models.spec import ModelSpec, read_spec


class VisionEncoder:
    """One process's encode part. Not thread-safe: one forward at a time.

    Several pictures (of any requests) share one forward. In `exact` mode each runs
    alone, so that its rows have the same bits whatever it arrives with, on any machine:
    matrix products may round differently for other heights (measured on one: equal in
    bfloat16 for all families, up to 1.5e-6 apart in float32 for Qwen2.5-VL).
    """

    def __init__(self, model: Any, spec: ModelSpec, device: str, exact: bool) -> None:
        self.spec = spec
        self.weights_bytes = weights_bytes(model)
        self.hidden = spec.hidden
        self.planes = spec.planes
        self._model = model
        self._device = torch.device(device)
        self._exact = exact
        self._features = model.base_model.get_image_features
        self._arguments = frozenset(inspect.signature(self._features).parameters)

    @classmethod
    def load(
        cls,
        path: str | Path,
        dtype: str = "auto",
        device: str = "cpu",
        exact: bool = False,
        threads: int = 1,
        kernels: Literal["auto", "off"] = "auto",
    ) -> VisionEncoder:
        """Load the encode part only; `threads` is set for the whole process.

        `kernels`: see `LanguageModel.load`.

        Raises:
            EpdError: see `load_part`.
        """
        usable_device(device)
        torch.set_num_threads(threads)
        spec = read_spec(path, dtype)
        fits = kernels == "auto" and device == "cpu" and spec.dtype == "bfloat16"
        library = build.load() if fits else None
        attn = None if library is None else vision_attention.NAME
        model = load_part(path, "encode", spec.dtype, attn=attn).to(device)
        if library is not None:
            kernel = LinearKernel(library, threads)
            pack_linears(model, kernel)
            pack_patches(model, kernel)
            fuse_vision_layers(model, library, threads)
        return cls(model, spec, device, exact)

    def report_layers(self, done: Callable[[], None]) -> None:
        """See `epd.models.progress`."""
        report_layers(self._model, done)

    def parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Names and weights that this process holds."""
        return list(self._model.named_parameters())

    @torch.inference_mode()
    def encode(self, images: Sequence[PreparedImage]) -> list[torch.Tensor]:
        """Embed pictures; result i is [planes, rows, hidden] of ``images[i]``.

        Plane 0 is what takes the place of the image tokens, the others are deepstack
        levels in order. Each result is contiguous, in the model's dtype, on its device,
        and owns its memory.

        Raises:
            EpdError: INVALID_IMAGE, the model made another number of rows than the
                processor planned (both come from transformers; they differ for some
                extreme sizes).
        """
        if self._exact:
            return [rows for image in images for rows in self._forward([image])]
        return self._forward(images) if images else []

    def _forward(self, images: Sequence[PreparedImage]) -> list[torch.Tensor]:
        order = families.batch_order(self.spec.family, images)
        batch = families.collate(self.spec.family, [images[i] for i in order])
        output = self._features(**self._to_device(batch), return_dict=True)
        planes = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        sizes = [images[i].rows for i in order]
        split = [_split_rows(plane, sizes) for plane in planes]
        results: list[torch.Tensor | None] = [None] * len(images)
        for place, index in enumerate(order):
            results[index] = torch.stack([plane[place] for plane in split])
        return [result for result in results if result is not None]

    def _to_device(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        dtype = getattr(torch, self.spec.dtype)
        return {
            name: value.to(self._device, dtype if value.is_floating_point() else None)
            for name, value in batch.items()
            if name in self._arguments
        }


def _split_rows(features: Any, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Rows [rows, hidden] of each picture, whatever a family groups them by.

    Families return a tensor a picture, a tensor a tile, or one for all; in order and
    without gaps, so that flattened they are the same.
    """
    rows = torch.cat([part.reshape(-1, part.shape[-1]) for part in features])
    if rows.shape[0] != sum(sizes):
        raise EpdError(
            ErrorKind.INVALID_IMAGE,
            f"the model makes {rows.shape[0]} embedding rows where its processor plans "
            f"{sum(sizes)}; it does not take a picture of this size",
        )
    split: tuple[torch.Tensor, ...] = torch.split(rows, list(sizes))
    return split
