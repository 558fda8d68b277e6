"""What a model's own forward takes in place of pixels: the rows that encode made of them.

Shapes: R image rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

from epd.models.batch import ForwardBatch
from epd.models.spec import ModelSpec


@dataclass
class ImageRows(BaseModelOutputWithPooling):
    """The output of a vision tower, deepstack or not."""

    deepstack_features: list[list[Tensor]] | None = None


class RowScatter:
    """Gives one model's forward the image rows of a batch, on the model's device."""

    def __init__(self, model: Any, spec: ModelSpec, device: torch.device) -> None:
        self._model = model
        self._spec = spec
        self._device = device

    def __call__(self, batch: ForwardBatch) -> dict[str, ImageRows] | None:
        """For `mm_encoder_outputs`; None without image rows."""
        rows = self._joined(batch)
        if rows is None:
            return None
        rows = self._with_generated(batch, rows)
        deep = [[plane] for plane in rows[1:]] if len(rows) > 1 else None
        return {"image": ImageRows(pooler_output=[rows[0]], deepstack_features=deep)}

    def _joined(self, batch: ForwardBatch) -> Tensor | None:
        """[planes, R, hidden] on the device, or None without image rows."""
        wanted = sum(sequence.image_rows for sequence in batch.sequences)
        given = batch.embeddings
        pieces = [] if given is None else [given] if isinstance(given, Tensor) else list(given)
        assert sum(piece.shape[1] for piece in pieces) == wanted, "rows given and rows wanted"
        if not wanted:
            return None
        assert all(piece.shape[0] == self._spec.planes for piece in pieces)
        dtype = getattr(torch, self._spec.dtype)
        moved = [piece.to(self._device, dtype) for piece in pieces]
        # One piece stays where it is: on a CPU, in the memory that it landed in.
        return moved[0] if len(moved) == 1 else torch.cat(moved, 1)

    def _with_generated(self, batch: ForwardBatch, rows: Tensor) -> Tensor:
        """Add rows for placeholder ids that were generated: the id's own embedding.

        The model's forward puts a row at every placeholder id of the batch. Deepstack
        planes of such a row are zero: they are added.
        """
        real: list[bool] = []
        start = 0
        for sequence in batch.sequences:
            ids = batch.token_ids[start : start + sequence.query_len]
            found = int((ids == self._spec.image_token_id).sum())
            assert found >= sequence.image_rows, "fewer placeholders than image rows"
            real += [i < sequence.image_rows for i in range(found)]
            start += sequence.query_len
        if all(real):
            return rows
        full = rows.new_zeros(rows.shape[0], len(real), rows.shape[2])
        ids = torch.tensor(self._spec.image_token_id, device=self._device)
        full[0] = self._model.get_input_embeddings()(ids)
        full[:, torch.tensor(real, device=self._device)] = rows
        return full
