"""Measure a checkpoint on scenes that it never saw, as a client would use it.

    python -m demo.evaluate demo/checkpoint

An answer is right if it equals the expected one as a whole. Everything goes through AutoProcessor
and `generate` of transformers, greedily and in the checkpoint's own bfloat16; no code of the
training takes part but the one that invents scenes. The questions about pictures are asked twice
more, with blank pictures and with another question's: a model that looks must fail then.
"""

import demo.quiet_cpu  # noqa: F401  isort: skip

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from demo.questions import Question
from demo.rows import pictures_and_questions
from demo.samples import PICTURES, QUESTIONS
from demo.scenes import render

HELD_OUT = "held out"
"""Seed of the scenes; training seeds have another form, so no scene is shared."""


@dataclass(frozen=True, slots=True)
class Case:
    pictures: tuple[Image.Image, ...]
    question: Question


class Model:
    """A checkpoint and its processor, asked in batches."""

    def __init__(self, folder: Path, dtype: torch.dtype, text_first: bool = False) -> None:
        self._processor = AutoProcessor.from_pretrained(folder)
        self._model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).eval()
        self._text_first = text_first

    def answers(self, cases: list[Case], batch: int = 32) -> list[str]:
        out = [""] * len(cases)
        # One batch holds prompts of about one length: little padding, and it can't mix prompts
        # with and without pictures.
        order = sorted(range(len(cases)), key=lambda i: len(cases[i].pictures))
        for count in sorted({len(c.pictures) for c in cases}):
            group = [i for i in order if len(cases[i].pictures) == count]
            for start in range(0, len(group), batch):
                chosen = group[start : start + batch]
                for i, answer in zip(chosen, self._ask([cases[i] for i in chosen]), strict=True):
                    out[i] = answer
        return out

    @torch.inference_mode()
    def _ask(self, cases: list[Case]) -> list[str]:
        inputs = self._processor.apply_chat_template(
            [self._messages(case) for case in cases],
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True},
        )
        output = self._model.generate(**inputs, max_new_tokens=80)
        new = output[:, inputs["input_ids"].shape[1] :]
        return self._processor.tokenizer.batch_decode(new, skip_special_tokens=True)

    def _messages(self, case: Case) -> list[dict[str, Any]]:
        content = [{"type": "image", "image": picture} for picture in case.pictures]
        text = {"type": "text", "text": case.question.text}
        content = [text, *content] if self._text_first else [*content, text]
        return [{"role": "user", "content": content}]


def held_out_cases(count: int, per_kind: int) -> list[Case]:
    """At most `per_kind` questions of a kind, about up to `count` drawn subjects."""
    rng = random.Random(HELD_OUT)
    kept: dict[str, list[Case]] = defaultdict(list)
    for _ in range(count):
        scenes, questions = pictures_and_questions(rng)
        pictures = tuple(render(scene) for scene in scenes)
        for question in questions:
            if len(kept[question.kind]) < per_kind:
                kept[question.kind].append(Case(pictures, question))
    return [case for kind in sorted(kept) for case in kept[kind]]


def sample_cases() -> list[Case]:
    """The questions of `demo/questions.json`."""
    return [
        Case(
            tuple(Image.open(PICTURES / name).convert("RGB") for name in entry["pictures"]),
            Question("sample", entry["question"], entry["answer"]),
        )
        for entry in json.loads(QUESTIONS.read_text())
    ]


def share_right(cases: Iterable[Case], answers: Iterable[str]) -> float:
    right = [a == c.question.answer for c, a in zip(cases, answers, strict=True)]
    return sum(right) / len(right)


def by_kind(cases: list[Case], answers: list[str]) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[bool]] = defaultdict(list)
    for case, answer in zip(cases, answers, strict=True):
        groups[case.question.kind].append(answer == case.question.answer)
    return {
        kind: {"accuracy": round(sum(g) / len(g), 4), "questions": len(g)}
        for kind, g in groups.items()
    }


def with_pictures(cases: list[Case], of: Callable[[int], tuple[Image.Image, ...]]) -> list[Case]:
    return [replace(case, pictures=of(i)) for i, case in enumerate(cases)]


def blank(pictures: tuple[Image.Image, ...]) -> tuple[Image.Image, ...]:
    return tuple(Image.new("RGB", p.size, "white") for p in pictures)


def of_another(cases: list[Case]) -> list[Case]:
    """Every question about the pictures of a far question of the same kind."""
    kinds: dict[str, list[int]] = defaultdict(list)
    for i, case in enumerate(cases):
        kinds[case.question.kind].append(i)

    def other(i: int) -> tuple[Image.Image, ...]:
        same = kinds[cases[i].question.kind]
        place = same.index(i)
        return cases[same[(place + len(same) // 2) % len(same)]].pictures

    return with_pictures(cases, other)


def measure(model: Model, cases: list[Case]) -> dict[str, Any]:
    answers = model.answers(cases)
    seeing = [c for c in cases if c.pictures]
    seen = [a for c, a in zip(cases, answers, strict=True) if c.pictures]
    blanks = with_pictures(seeing, lambda i: blank(seeing[i].pictures))
    others = of_another(seeing)
    samples = sample_cases()
    return {
        "kinds": by_kind(cases, answers),
        "overall": round(share_right(cases, answers), 4),
        "questions about pictures": {
            "with their pictures": round(share_right(seeing, seen), 4),
            "with blank pictures": round(share_right(blanks, model.answers(blanks)), 4),
            "with another question's pictures": round(
                share_right(others, model.answers(others)), 4
            ),
        },
        "sample questions": share_right(samples, model.answers(samples)),
        "wrong": [
            {"kind": c.question.kind, "asked": c.question.text, "expected": c.question.answer}
            | {"answered": a}
            for c, a in zip(cases, answers, strict=True)
            if a != c.question.answer
        ],
    }


def print_report(result: dict[str, Any], wrong: int) -> None:
    for kind, entry in sorted(result["kinds"].items()):
        print(f"{kind:16} {entry['accuracy']:6.1%} of {entry['questions']}")
    print(f"{'overall':16} {result['overall']:6.1%}")
    for how, share in result["questions about pictures"].items():
        print(f"about pictures, {how:34} {share:6.1%}")
    print(f"sample questions {result['sample questions']:6.1%}")
    for entry in result["wrong"][:wrong]:
        print(" | ".join(entry.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the demo model on held-out scenes.")
    add = parser.add_argument
    add("checkpoint", type=Path)
    add("--subjects", type=int, default=2000, help="how many pictures or pairs to draw")
    add("--per-kind", type=int, default=200, help="how many questions of a kind to keep")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    add("--text-first", action="store_true", help="put the question before the pictures")
    add("--threads", type=int, default=1)
    add("--wrong", type=int, default=0, help="how many wrong answers to print")
    add("--json", type=Path, help="write the result here too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    started = time.time()
    model = Model(args.checkpoint, getattr(torch, args.dtype), args.text_first)
    result = measure(model, held_out_cases(args.subjects, args.per_kind))
    print_report(result, args.wrong)
    print(f"{time.time() - started:.0f} s")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
