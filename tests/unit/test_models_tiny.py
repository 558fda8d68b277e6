"""The tiny checkpoints can show a fault: answers vary, and follow pictures and their order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from epd.models.spec import fingerprint
from tests.tiny import FAMILIES, build, reference_generate
from tests.unit.pictures import noise

Tiny = Callable[..., Path]
IMAGE = {"type": "image"}


def _asking(*parts: str | dict[str, str]) -> list[dict[str, Any]]:
    content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_follow_text_pictures_and_their_order(tiny_checkpoint: Tiny, family: str) -> None:
    path = tiny_checkpoint(family)
    one, other = noise(50, 50, 1), noise(50, 50, 2)
    text = _asking("hello world")
    single = _asking(IMAGE, "what is this?")
    double = _asking("first ", IMAGE, " second ", IMAGE, "?")
    answers = [
        reference_generate(path, messages, images, max_new_tokens=24)
        for messages, images in (
            (text, []),
            (_asking("what is it?"), []),
            (single, [one]),
            (single, [other]),
            (double, [one, other]),
            (double, [other, one]),
        )
    ]
    ids = [answer.ids for answer in answers]
    for first, second in ((0, 1), (2, 3), (4, 5)):
        assert ids[first] != ids[second]
    assert answers[2].prompt_ids == answers[3].prompt_ids
    assert all(len(set(answer)) >= 4 for answer in ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_teacher_forced_logits_choose_the_same_tokens(tiny_checkpoint: Tiny, family: str) -> None:
    asked = _asking("a ", IMAGE, " b ", IMAGE)
    pictures = [noise(72, 40, 1), noise(48, 64, 2)]
    answer = reference_generate(tiny_checkpoint(family), asked, pictures, max_new_tokens=16)
    assert answer.logits.shape[0] == len(answer.ids) > 1
    chosen = answer.logits.argmax(-1).tolist()
    for forced, generated, gap in zip(chosen, answer.ids, answer.gaps(), strict=True):
        assert forced == generated or gap < 1e-4


def test_building_twice_gives_the_same_weights(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    again = build("qwen3_vl", tmp_path / "again")
    digest = fingerprint(again, "float32")
    assert digest == fingerprint(tiny_checkpoint("qwen3_vl"), "float32")
    other = build("qwen3_vl", tmp_path / "other", seed=1)
    assert fingerprint(other, "float32") != digest
