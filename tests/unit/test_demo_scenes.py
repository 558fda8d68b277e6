"""The demo's pictures, the questions about them, and the files that it ships."""

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageChops

from demo import samples
from demo.questions import about_number, about_pair, about_shapes
from demo.scenes import (
    CELLS,
    COLOURS,
    KINDS,
    Scene,
    layout,
    random_number_scene,
    random_shapes_scene,
    render,
)
from demo.small_talk import without_picture

DEMO = Path(samples.__file__).parent
CHECKPOINT = DEMO / "checkpoint"
SEEDS = range(40)


def shapes_scene(seed: int) -> Scene:
    return random_shapes_scene(random.Random(seed))


@pytest.mark.parametrize("invent", [random_shapes_scene, random_number_scene])
def test_same_seed_same_scene_and_picture(invent):
    for seed in SEEDS:
        scene = invent(random.Random(seed))
        assert scene == invent(random.Random(seed))
        assert render(scene).tobytes() == render(scene).tobytes()
        assert render(scene).size == (scene.width, scene.height)


def test_scenes_differ_between_seeds():
    assert len({shapes_scene(seed) for seed in SEEDS}) == len(SEEDS)


def test_every_shape_has_a_cell_of_its_own_and_another_colour_than_the_background():
    for scene in map(shapes_scene, SEEDS):
        cells = [s.cell for s in scene.shapes]
        assert cells == sorted(set(cells))
        assert scene.background not in {s.colour for s in scene.shapes}


def test_pixels_show_what_the_layout_says():
    for scene in map(shapes_scene, SEEDS):
        pixels = np.asarray(render(scene)).astype(int)
        plan = layout(scene)
        assert np.abs(pixels[0, 0] - plan.background).max() <= 1
        for placed in plan.shapes:
            middle = pixels[round(placed.y), round(placed.x)]
            assert np.abs(middle - placed.fill).max() <= 1
            assert placed.x // (scene.width / 2) == placed.shape.column
            assert placed.y // (scene.height / 2) == placed.shape.row


def test_colour_alone_changes_only_the_shape():
    scene = samples.SCENES["red_circle.png"]
    other = replace(scene, shapes=(replace(scene.shapes[0], colour="blue"),))
    assert render(other).tobytes() == render(samples.SCENES["blue_circle.png"]).tobytes()
    box = ImageChops.difference(render(scene), render(other)).getbbox()
    assert box is not None
    assert box[2] <= scene.width / 2 + 1
    assert box[3] <= scene.height / 2 + 1


def answers(questions) -> list[tuple[str, str, str]]:
    return [(q.kind, q.text, q.answer) for q in questions]


def test_answers_about_shapes_agree_with_the_scene():
    for seed in SEEDS:
        scene = shapes_scene(seed)
        kinds = Counter(s.kind for s in scene.shapes)
        for kind, text, answer in answers(about_shapes(scene, random.Random(seed))):
            if kind == "background":
                assert answer == f"The background is {scene.background}."
            elif kind == "exist":
                asked = next(k for k in KINDS if k in text)
                assert answer.startswith("Yes" if kinds[asked] else "No")
            elif kind == "exist_coloured":
                coloured = text.rstrip("?").split(" a")[-1].removeprefix("n").split()[:2]
                there = coloured in [[s.colour, s.kind] for s in scene.shapes]
                assert answer.startswith("Yes" if there else "No")
            elif kind == "absent" and "number" not in answer:
                asked = next(k for k in KINDS if k in text)
                assert not kinds[asked]


def test_answers_about_one_shape_agree_with_that_shape():
    for seed in SEEDS:
        scene = shapes_scene(seed)
        for kind, text, answer in answers(about_shapes(scene, random.Random(seed))):
            if kind not in {"colour", "size", "where", "side"}:
                continue
            (shape,) = (s for s in scene.shapes if s.kind in text)
            said = answer.rstrip(".").split()
            assert shape.kind in said
            if kind == "colour":
                assert said[-1] == shape.colour
            elif kind == "size":
                assert said[-1] == shape.size
            else:
                assert said[-1] in CELLS[shape.cell].split()


def test_counts_agree_with_the_scene():
    words = ["no", "one", "two", "three", "four"]
    for seed in SEEDS:
        scene = shapes_scene(seed)
        for kind, text, answer in answers(about_shapes(scene, random.Random(seed))):
            if kind == "count_all":
                assert words[len(scene.shapes)] in answer.split()
            elif kind == "count_kind":
                asked = next(k for k in KINDS if k in text)
                assert words[len(scene.of_kind(asked))] in answer.split()


def test_descriptions_name_every_shape_in_reading_order():
    for scene in map(shapes_scene, SEEDS):
        (text,) = (q.answer for q in about_shapes(scene, random.Random(0)) if q.kind == "describe")
        names = [f"{s.size} {s.colour} {s.kind}" for s in scene.shapes]
        places = [text.lower().find(n) for n in names]
        assert -1 not in places
        assert places == sorted(places) or len(set(names)) < len(names)
        assert text.endswith(f"{scene.background} background.")


def test_numbers_are_read_as_printed():
    for seed in SEEDS:
        scene = random_number_scene(random.Random(seed))
        assert 0 <= int(scene.number) <= 99
        assert scene.number == str(int(scene.number))
        for kind, _, answer in answers(about_number(scene, random.Random(seed))):
            if kind == "read":
                assert answer == f"The number is {scene.number}."


def test_comparisons_agree_with_both_pictures():
    for seed in SEEDS:
        rng = random.Random(seed)
        first, second = random_shapes_scene(rng), random_shapes_scene(rng)
        for kind, text, answer in answers(about_pair(first, second, rng)):
            if kind != "pair_more":
                continue
            asked = [k for k in KINDS if k in text] or KINDS
            a, b = (sum(s.kind in asked for s in x.shapes) for x in (first, second))
            expected = "Both" if a == b else "The first" if a > b else "The second"
            assert answer.startswith(expected)


def test_sums_are_right():
    rng = random.Random(0)
    sums = [q for q in (without_picture(rng) for _ in range(300)) if q.kind == "arithmetic"]
    assert len(sums) > 30
    for question in sums:
        a, sign, b, _, value = question.answer.split()
        assert int(value) == (int(a) + int(b) if sign == "+" else int(a) - int(b))


def test_sample_pictures_are_the_drawn_scenes():
    assert {p.name for p in samples.PICTURES.glob("*.png")} == set(samples.SCENES)
    for name, scene in samples.SCENES.items():
        with Image.open(samples.PICTURES / name) as picture:
            assert picture.tobytes() == render(scene).tobytes()


def test_questions_file_is_valid():
    entries = json.loads(samples.QUESTIONS.read_text())
    assert entries == [{"pictures": p, "question": q, "answer": a} for p, q, a in samples.EXPECTED]
    for entry in entries:
        assert all((samples.PICTURES / name).is_file() for name in entry["pictures"])


def test_checkpoint_is_complete_and_small():
    names = {p.name for p in CHECKPOINT.iterdir()}
    assert names == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "preprocessor_config.json",
        "processor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(p.stat().st_size for p in CHECKPOINT.iterdir()) < 16 << 20
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert config["architectures"] == ["Qwen3VLForConditionalGeneration"]
    assert config["dtype"] == "bfloat16"


def test_every_colour_can_be_told_from_the_others():
    colours = np.array(list(COLOURS.values()))
    distance = np.abs(colours[:, None] - colours[None]).max(-1)
    assert distance[~np.eye(len(colours), dtype=bool)].min() > 40  # jitter is at most 10 each


def test_documented_accuracy_is_the_measured_one():
    measured = json.loads((DEMO / "accuracy.json").read_text())
    text = (DEMO.parent / "docs" / "demo-model.md").read_text()
    shown, below = text.split("## What it can't do")
    for kind, entry in measured["kinds"].items():
        row = f"{entry['accuracy']:.1%} of {entry['questions']} |"
        part = shown if entry["accuracy"] >= 0.95 else below
        assert any(f"| `{kind}` |" in line and row in line for line in part.splitlines()), kind
    for share in measured["questions about pictures"].values():
        assert f"{share:.1%}" in shown
