"""What int8 weights change: logits, the best token, and whole answers.

    python -m bench.quantize_error demo/checkpoint [--per-kind 20]
    python -m bench.quantize_error CHECKPOINT --random 8

Two copies of the checkpoint run on the compiled kernels, one with bfloat16 and one with
int8 weights; nothing else differs. Logits are compared where the answer is (teacher
forcing: both read the same tokens): root mean square of the difference, beside the spread
of the logits themselves; Kullback-Leibler divergence of int8's distribution from
bfloat16's; how often both find the same token most likely. As a scale, bfloat16 by torch
is compared with bfloat16 by the kernels, too: those differ by roundings alone.

The demo checkpoint is asked held-out questions and must say the whole expected answer;
any other one reads random tokens, where only the logits mean something.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

from bench.flags import flag_parser
from demo.evaluate import Case, Model, by_kind, held_out_cases, share_right
from epd.models.kernels import build
from epd.models.kernels.linear import Int8Kernel, LinearKernel, pack_linears

RANDOM_TOKENS = 256


@dataclass
class Error:
    """Of one model's logits against another's, row by row."""

    name: str
    square: list[float] = field(default_factory=list)
    spread: list[float] = field(default_factory=list)
    divergence: list[float] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)

    def add(self, wanted: Tensor, found: Tensor) -> None:
        """[rows, vocab] each."""
        p, q = wanted.float().log_softmax(-1), found.float().log_softmax(-1)
        self.square += (found.float() - wanted.float()).square().mean(-1).tolist()
        self.spread += wanted.float().var(-1).tolist()
        self.divergence += (p.exp() * (p - q)).sum(-1).tolist()
        self.same += (wanted.argmax(-1) == found.argmax(-1)).tolist()

    def __str__(self) -> str:
        rmse, spread = statistics.mean(self.square) ** 0.5, statistics.mean(self.spread) ** 0.5
        worst = sorted(self.divergence)[int(0.99 * len(self.divergence))]
        return (
            f"| {self.name} | {len(self.same)} | {rmse:.4f} | {rmse / spread:.4f} "
            f"| {statistics.mean(self.divergence):.2e} | {worst:.2e} "
            f"| {statistics.mean(self.same):.2%} |"
        )


def main() -> None:
    parser = flag_parser(__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--per-kind", type=int, default=20)
    parser.add_argument("--random", type=int, default=0, help="sequences of random tokens")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.random:
        _compare(args.checkpoint, _random_inputs(args))
        return
    cases = held_out_cases(2000, args.per_kind)
    _compare(args.checkpoint, _forced_inputs(args.checkpoint, cases))
    _answers(args.checkpoint, cases)


def _load(path: Path, kernel: type[LinearKernel] | None) -> Any:
    """transformers' own model; with a kernel, its language model's linear layers use it."""
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.bfloat16).eval()
    _use(model.requires_grad_(False), kernel)
    return model


def _use(model: Any, kernel: type[LinearKernel] | None) -> None:
    library = build.load()
    if library is None:
        raise SystemExit("no kernels on this machine (docs/kernels.md)")
    if kernel is not None:
        for part in (model.get_decoder(), model.lm_head):
            pack_linears(part, kernel(library, 1))


Inputs = Iterator[tuple[dict[str, Any], int]]
"""Arguments of a forward, and how many of its last rows are compared."""


@torch.inference_mode()
def _compare(path: Path, inputs: Inputs) -> None:
    plain, packed, int8 = (_load(path, kernel) for kernel in (None, LinearKernel, Int8Kernel))
    errors = [Error("int8"), Error("bfloat16 by torch")]
    for arguments, rows in inputs:
        wanted, found, other = (
            model(**arguments, logits_to_keep=rows + 1).logits[0, :rows]
            for model in (packed, int8, plain)
        )
        errors[0].add(wanted, found)
        errors[1].add(wanted, other)
    print("| against bfloat16 by the kernels | rows | RMSE | RMSE / spread", end="")
    print(" | KL mean | KL p99 | same best token |\n|" + "---|" * 7)
    for error in errors:
        print(error)


def _random_inputs(args: argparse.Namespace) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    for _ in range(args.random):
        ids = torch.randint(10, 1000, (1, RANDOM_TOKENS), generator=generator)
        yield {"input_ids": ids}, RANDOM_TOKENS - 1


def _forced_inputs(path: Path, cases: list[Case]) -> Inputs:
    processor = AutoProcessor.from_pretrained(path)
    for case in cases:
        content = [{"type": "image", "image": picture} for picture in case.pictures]
        content.append({"type": "text", "text": case.question.text})
        messages = [{"role": "user", "content": content}]
        inputs = processor.apply_chat_template(
            messages,
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        answer = processor.tokenizer(case.question.answer, return_tensors="pt")["input_ids"]
        yield _followed_by(dict(inputs), answer), answer.shape[1]


def _followed_by(inputs: dict[str, Any], answer: Tensor) -> dict[str, Any]:
    """The same inputs with the answer behind the prompt."""
    inputs["input_ids"] = torch.cat([inputs["input_ids"], answer], 1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if "mm_token_type_ids" in inputs:
        text = torch.zeros_like(answer)
        inputs["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], text], 1)
    return inputs


def _answers(path: Path, cases: list[Case]) -> None:
    """Whole answers, greedy, kind by kind."""
    kinds = []
    for kernel in (LinearKernel, Int8Kernel):
        model = Model(path, torch.bfloat16)
        _use(model._model.requires_grad_(False), kernel)
        answers = model.answers(cases)
        kinds.append((by_kind(cases, answers), share_right(cases, answers), answers))
    (plain, all_plain, said), (int8, all_int8, said_int8) = kinds
    print("\n| whole answers right | questions | bfloat16 | int8 |\n|---|---|---|---|")
    for kind, entry in plain.items():
        count, right = entry["questions"], entry["accuracy"]
        print(f"| `{kind}` | {count} | {right:.1%} | {int8[kind]['accuracy']:.1%} |")
    print(f"| all | {len(cases)} | {all_plain:.2%} | {all_int8:.2%} |")
    same = statistics.mean(a == b for a, b in zip(said, said_int8, strict=True))
    print(f"\nthe same answer, right or wrong: {same:.2%}")


if __name__ == "__main__":
    main()
