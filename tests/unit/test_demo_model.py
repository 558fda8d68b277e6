"""The demo checkpoint answers from the picture, and training computes what serving computes."""

import json
import os
import random
import re
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, Qwen2VLImageProcessorPil

from demo.evaluate import Model, blank, sample_cases, share_right, with_pictures
from demo.model import PaddedVisionAttention, train_forward
from demo.questions import about_number, about_pair, about_shapes
from demo.rows import RowEncoder, collate, random_row
from demo.samples import EXPECTED, HERE, SCENES
from demo.train import BatchSource, parse_args, schedule, train
from demo.vision import MAX_PIXELS, MERGE, MIN_PIXELS, PATCH, patchify

CHECKPOINT = HERE / "checkpoint"


@cache
def processor():
    return AutoProcessor.from_pretrained(CHECKPOINT)


@cache
def float_model():
    return AutoModelForImageTextToText.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()


def test_sample_questions_are_answered_right():
    cases = sample_cases()
    answers = Model(CHECKPOINT, torch.bfloat16).answers(cases)
    assert answers == [case.question.answer for case in cases]


def kinds_of(names: tuple[str, ...], text: str, answer: str) -> set[str]:
    """Kinds under which `demo.questions` asks exactly this about these pictures."""
    scenes = [SCENES[name] for name in names]
    found = set()
    for seed in range(500):
        rng = random.Random(seed)
        if len(scenes) == 2:
            first, second = scenes
            questions = about_pair(first, second, rng)
        elif scenes[0].number:
            questions = about_number(scenes[0], rng)
        else:
            questions = about_shapes(scenes[0], rng)
        found |= {q.kind for q in questions if (q.text, q.answer) == (text, answer)}
    return found


def test_only_kinds_that_it_is_good_at_are_shown():
    measured = json.loads((HERE / "accuracy.json").read_text())["kinds"]
    for names, text, answer in EXPECTED:
        kinds = kinds_of(tuple(names), text, answer)
        assert len(kinds) == 1, f"{text}: {kinds}"
        assert measured[kinds.pop()]["accuracy"] >= 0.95, text
    readme = (HERE.parent / "README.md").read_text()
    quoted = set(re.findall(r'"([A-Z][^"]*\?)"', readme))
    assert quoted
    assert quoted <= {text for _, text, _ in EXPECTED}


def test_the_question_may_come_before_the_pictures():
    cases = sample_cases()  # docs/demo-model.md says which kinds of question suffer
    answers = Model(CHECKPOINT, torch.bfloat16, text_first=True).answers(cases)
    assert share_right(cases, answers) > 0.9


def test_answers_follow_the_picture():
    cases = sample_cases()
    blanks = with_pictures(cases, lambda i: blank(cases[i].pictures))
    assert share_right(blanks, Model(CHECKPOINT, torch.bfloat16).answers(blanks)) < 0.2


@pytest.mark.parametrize("size", [(96, 96), (160, 128), (192, 97), (640, 480), (40, 50)])
def test_patches_equal_the_image_processor(size):
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    image = Image.fromarray(noise)
    expected = Qwen2VLImageProcessorPil(
        size={"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
        patch_size=PATCH,
        merge_size=MERGE,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )(image, return_tensors="np")
    patches, rows, columns = patchify(image)
    assert expected["image_grid_thw"].tolist() == [[1, rows, columns]]
    np.testing.assert_allclose(patches, expected["pixel_values"], atol=1e-6)


def chat_logits(row, turns) -> torch.Tensor:
    """Logits that the untouched model gives at the answers of one segment, asked alone."""
    encoded = RowEncoder(processor().tokenizer)(type(row)(row.scenes, row.prefix, [turns]))
    ids = torch.tensor([encoded.ids])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if encoded.patches:
        image = float_model().config.image_token_id
        inputs["pixel_values"] = torch.from_numpy(np.concatenate(encoded.patches))
        inputs["image_grid_thw"] = torch.tensor([(1, *g) for g in encoded.grids])
        inputs["mm_token_type_ids"] = (ids == image).int()
    with torch.inference_mode():
        logits = float_model()(**inputs).logits[0]
    return torch.cat([logits[start - 1 : end - 1] for _, start, end in encoded.answers])


@pytest.mark.parametrize("seed", range(6))
def test_a_row_equals_its_chats_one_by_one(seed):
    row = random_row(random.Random(seed))
    encoded = RowEncoder(processor().tokenizer)(row)
    segments = row.segments[: encoded.segment[-1]]  # the rest didn't fit
    expected = torch.cat([chat_logits(row, turns) for turns in segments])
    attention = PaddedVisionAttention(float_model())
    with torch.inference_mode():
        batch = collate([encoded], processor().tokenizer.pad_token_id)
        logits, _ = train_forward(float_model(), batch, attention)
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)


def test_batches_depend_on_the_step_alone():
    def source() -> BatchSource:
        return BatchSource(RowEncoder(processor().tokenizer), 0, seed=3, rows=2, lessons=False)

    in_order = source()
    batches = [in_order[step] for step in range(3)]
    assert torch.equal(source()[2].ids_BL, batches[2].ids_BL)
    assert not torch.equal(batches[0].ids_BL, batches[1].ids_BL)


def test_schedule_warms_up_stays_and_falls():
    assert schedule(0, 1000, 200)[0] == pytest.approx(1 / 60)
    assert schedule(500, 1000, 200) == (1.0, 1.0)
    assert schedule(900, 1000, 200) == (0.5, 0.5)
    # How long a run is may be decided late: until the decay, the schedule doesn't know it.
    assert schedule(500, 1000, 200) == schedule(500, 100_000, 200)


def test_a_resumed_run_gives_the_same_weights(tmp_path):
    def weights(name: str, *arguments: str) -> bytes:
        common = ["--init", str(CHECKPOINT), "--out", str(tmp_path / name), "--batch", "2"]
        train(parse_args([*common, *arguments]))
        return (tmp_path / name / "model.safetensors").read_bytes()

    whole = weights("whole", "--steps", "4", "--decay", "1")
    # Interrupted before anyone had decided how long the run would be.
    weights("parts", "--steps", "2", "--decay", "0", "--save-every", "2")
    state = str(tmp_path / "parts.state.pt")
    assert weights("parts", "--steps", "4", "--decay", "1", "--resume", state) == whole


def test_a_run_from_scratch_repeats_to_the_byte(tmp_path):
    """In processes of their own, whose sets and dicts of strings are ordered differently."""

    def start(seed: str) -> subprocess.Popen[bytes]:
        arguments = ["--steps", "3", "--decay", "1", "--batch", "2", "--out", str(tmp_path / seed)]
        return subprocess.Popen(
            [sys.executable, "-m", "demo.train", *arguments],
            cwd=HERE.parent,
            env=os.environ | {"PYTHONHASHSEED": seed},
            stdout=subprocess.DEVNULL,
        )

    runs = [start("1"), start("2")]
    assert [run.wait(200) for run in runs] == [0, 0]
    files = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert "model.safetensors" in files
    for name in files:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes(), name
