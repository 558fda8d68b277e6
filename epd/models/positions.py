"""Position rows of a request's tokens: its prompt's by the model, all later ones by counting.

Shapes: T tokens; P position rows (1, or 4 with mRoPE: text, time, height, width).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from epd.errors import invalid
from epd.jobs import ImageItem
from epd.models.grids import check_grids


class PositionRows:
    """One model's. Keeps nothing of a request; any thread may ask."""

    def __init__(self, model: Any, image_token_id: int) -> None:
        self._model = model
        self._image_token_id = image_token_id
        self.mrope = hasattr(model.base_model, "get_rope_index")

    def of(
        self, token_ids: Tensor, items: Sequence[ImageItem], prompt_length: int
    ) -> tuple[Tensor, int]:
        """Position rows [P, T] of prompt and generated ids, and the decode delta.

        The prompt's rows come from the model's own method. Every later token, at index
        i of the sequence, has text position i and i + delta in the other rows, whether
        decode makes it or prefill computes it again after a failover. An image
        placeholder that was generated is an ordinary token.

        Raises:
            EpdError: the placeholders of the prompt are not the items' rows, or an
                item's grid is not of its rows.
        """
        prompt = token_ids[:prompt_length].cpu()
        marks = prompt == self._image_token_id
        wanted = sum(item.rows for item in items)
        if int(marks.sum()) != wanted:
            raise invalid(f"{int(marks.sum())} image placeholders for {wanted} rows", "items")
        rows = self._of_prompt(prompt, marks, items)
        delta = int(rows[1:].max() - rows[0].max()) if len(rows) > 1 else 0
        later = self.continuation(prompt_length, len(token_ids) - prompt_length, delta)
        return torch.cat([rows, later], 1), delta

    def _of_prompt(self, prompt: Tensor, marks: Tensor, items: Sequence[ImageItem]) -> Tensor:
        options: dict[str, Any] = {}
        if items and self.mrope:
            check_grids(marks.tolist(), items, self._model.config.vision_config.spatial_merge_size)
            try:
                options["image_grid_thw"] = torch.tensor([item.grid for item in items]).view(-1, 3)
                options["mm_token_type_ids"] = marks[None].int()
                rows = self._model._prepare_position_ids_for_generation(prompt[None], options)
            except (RuntimeError, ValueError, IndexError, StopIteration) as error:
                raise invalid(f"the grids don't fit the rows: {error}", "items") from error
        else:
            rows = self._model._prepare_position_ids_for_generation(prompt[None], options)
        rows = rows[:, 0] if rows.ndim == 3 else rows
        return rows.to(torch.int64)  # type: ignore[no-any-return]

    def continuation(self, start: int, count: int, delta: int) -> Tensor:
        """Position rows [P, count] of generated tokens at sequence indices start, ..."""
        text = torch.arange(start, start + count)
        if not self.mrope:
            return text[None]
        return torch.stack([text, *[text + delta] * 3])
