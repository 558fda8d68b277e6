"""The oracle of the parity tests: transformers' own generate() in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from epd.models.processor import load_hf_processor


@dataclass(frozen=True, slots=True)
class Reference:
    """What transformers answers to one conversation.

    `logits` [len(ids), vocab] are generate()'s own: row i is for choosing `ids[i]`, raw
    (before penalties). A second forward over prompt and answer would not do: an answer
    may hold the image placeholder id, for which no image exists.
    """

    ids: list[int]
    prompt_ids: list[int]
    logits: torch.Tensor

    def gaps(self) -> list[float]:
        """Difference of the two best logits of each step; a tiny one is a tie."""
        best = self.logits.topk(2, dim=-1).values
        return [float(gap) for gap in best[:, 0] - best[:, 1]]


@lru_cache(maxsize=8)
def load_reference(path: str | Path) -> tuple[Any, Any]:
    """(whole model in float32 on the CPU, processor) of a checkpoint, kept for the session."""
    from transformers import AutoModelForImageTextToText
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForImageTextToText.from_pretrained(
        str(path), dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    )
    return model.eval(), load_hf_processor(path)


def reference_inputs(
    path: str | Path, messages: Sequence[dict[str, Any]], images: Sequence[Image.Image] = ()
) -> Any:
    """The processor's own tensors for a conversation.

    Content parts ``{"type": "image"}`` take `images` in order.
    """
    _, processor = load_reference(path)
    rest = iter(images)
    filled = [_with_images(message, rest) for message in messages]
    assert next(rest, None) is None, "more images than image parts"
    return processor.apply_chat_template(
        filled, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )


def _with_images(message: dict[str, Any], rest: Any) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}]}
    parts = [
        {"type": "image", "image": next(rest)} if part["type"] == "image" else dict(part)
        for part in content
    ]
    return {**message, "content": parts}


@torch.no_grad()
def reference_generate(
    path: str | Path,
    messages: Sequence[dict[str, Any]],
    images: Sequence[Image.Image] = (),
    max_new_tokens: int = 16,
    **generation: Any,
) -> Reference:
    """Greedy (unless `generation` says otherwise) answer of the whole model.

    `generation` goes to generate(), e.g. ``eos_token_id=None`` to go on after the end
    token.
    """
    model, _ = load_reference(path)
    inputs = reference_inputs(path, messages, images)
    options = {"do_sample": False, "max_new_tokens": max_new_tokens, **generation}
    output = model.generate(**inputs, **options, return_dict_in_generate=True, output_logits=True)
    prompt_ids = inputs["input_ids"][0].tolist()
    ids = output.sequences[0, len(prompt_ids) :].tolist()
    return Reference(ids, prompt_ids, torch.cat(output.logits).float())


def reference_forced(
    path: str | Path,
    messages: Sequence[dict[str, Any]],
    images: Sequence[Image.Image],
    ids: Sequence[int],
) -> Reference:
    """Teacher forcing: the whole model's logits at each of `ids`, given those before it."""
    forced = reference_generate(
        path,
        messages,
        images,
        max_new_tokens=len(ids),
        eos_token_id=None,
        logits_processor=[_Force(ids)],
    )
    assert forced.ids == list(ids)
    return forced


class _Force:
    """A logits processor that lets generate() choose the given tokens, one after another."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._rest = iter(ids)

    def __call__(self, _: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, float("-inf"))
        forced[:, next(self._rest)] = 0.0
        return forced
