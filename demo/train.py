"""Train the demo model on the CPU: pictures, questions, tokenizer and weights are all made here.

    python -m demo.train --out OUT --steps 8000                        from scratch
    python -m demo.train --out OUT --steps N --init demo/checkpoint    from existing weights

The schedule follows the step number alone and batch s is a function of (seed, s), so a run can be
stopped, resumed (`--resume`) and repeated with one thread to the same weights. The learning rate
stays constant until the last `--decay` steps: how long to train may be decided while it runs.
"""

import demo.quiet_cpu  # noqa: F401  isort: skip

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForImageTextToText, AutoTokenizer

from demo.checkpoint import save_checkpoint
from demo.model import LabelHead, PaddedVisionAttention, build_model, train_forward
from demo.rows import NOT_TRAINED, Batch, RowEncoder, collate, random_row
from demo.tokenizer import build_tokenizer

WARMUP_STEPS = 60
EASY_STEPS = 1000
"""From scratch, pictures with few shapes fade out over these steps."""
LABEL_LOSS_WEIGHT = 0.2


class BatchSource:
    """Batch s is a function of (seed, s), whatever was asked for before."""

    def __init__(self, encoder: RowEncoder, pad: int, seed: int, rows: int, lessons: bool) -> None:
        self._encoder, self._pad, self._seed = encoder, pad, seed
        self._rows, self._lessons = rows, lessons

    def __getitem__(self, step: int) -> Batch:
        rng = random.Random(f"{self._seed}/{step}")
        easy = max(0.0, 1.0 - step / EASY_STEPS) if self._lessons else 0.0
        rows = [self._encoder(random_row(rng, easy)) for _ in range(self._rows)]
        return collate(rows, self._pad)


class Trainer:
    """Muon for the matrices of the blocks, AdamW for everything else."""

    def __init__(self, model: Any, muon_rate: float, adam_rate: float) -> None:
        self.model, self.head = model, LabelHead()
        self.attention = PaddedVisionAttention(model)
        matrices, self._rest = _split_parameters(model)
        self._rest += list(self.head.parameters())
        self._rates = (muon_rate, adam_rate)
        self._optimizers = (
            torch.optim.Muon(
                matrices,
                lr=muon_rate,
                weight_decay=0.05,
                momentum=0.95,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(self._rest, lr=adam_rate, betas=(0.9, 0.95), weight_decay=0.0),
        )
        self._parameters = matrices + self._rest

    def step(self, batch: Batch, heat: float, fading: float) -> tuple[float, float]:
        """`heat` scales the learning rates, `fading` the label loss. -> (loss, label loss)"""
        for optimizer, rate in zip(self._optimizers, self._rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * heat
        with torch.autocast("cpu", torch.bfloat16):
            logits, label_loss = train_forward(self.model, batch, self.attention, self.head)
        target = batch.target_BL[batch.target_BL != NOT_TRAINED]
        loss = F.cross_entropy(logits.float(), target)
        (loss + LABEL_LOSS_WEIGHT * fading * label_loss).backward()
        for parameter in self._parameters:
            if parameter.grad is None:  # a batch without pictures; Muon wants every gradient
                parameter.grad = torch.zeros_like(parameter)
        torch.nn.utils.clip_grad_norm_(self._rest, 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.item(), label_loss.item()

    def state(self) -> dict[str, Any]:
        parts = (self.model, self.head, *self._optimizers)
        return {str(i): part.state_dict() for i, part in enumerate(parts)}

    def load_state(self, state: dict[str, Any]) -> None:
        for i, part in enumerate((self.model, self.head, *self._optimizers)):
            part.load_state_dict(state[str(i)])


def _split_parameters(model: Any) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    matrices, rest = [], []
    for name, parameter in model.named_parameters():
        is_block_matrix = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
        (matrices if is_block_matrix else rest).append(parameter)
    return matrices, rest


def schedule(step: int, steps: int, decay: int) -> tuple[float, float]:
    """(heat, fading) of a step: a warm-up, then constant, then linear to nothing."""
    remaining = min(1.0, (steps - step) / max(1, decay))
    return min((step + 1) / WARMUP_STEPS, remaining), remaining


def train(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.init) if args.init else build_tokenizer()
    if args.init:
        model = AutoModelForImageTextToText.from_pretrained(args.init, dtype=torch.float32)
    else:
        model = build_model(tokenizer)
    trainer = Trainer(model.train(), args.muon_rate, args.adam_rate)
    first = 0
    if args.resume:
        saved = torch.load(args.resume, weights_only=True)
        first = saved.pop("step")
        trainer.load_state(saved)
    encoder = RowEncoder(tokenizer)
    batches = BatchSource(encoder, tokenizer.pad_token_id, args.seed, args.batch, not args.init)
    report = Report(args.out)
    for step in range(first, args.steps):
        losses = trainer.step(batches[step], *schedule(step, args.steps, args.decay))
        report.add(step, *losses)
        if (step + 1) % args.save_every == 0:
            _save_state(trainer, step + 1, args.out)
            save_checkpoint(model, tokenizer, args.out)
    save_checkpoint(model, tokenizer, args.out)


def _save_state(trainer: Trainer, step: int, out: Path) -> None:
    """Beside the checkpoint, not in it: it is many times as large and of no use to a reader."""
    unfinished = out.with_name(out.name + ".state.tmp")
    torch.save(trainer.state() | {"step": step}, unfinished)
    unfinished.replace(out.with_name(out.name + ".state.pt"))


class Report:
    """Running means on stdout and in OUT.log.jsonl every 50 steps."""

    def __init__(self, out: Path) -> None:
        out.parent.mkdir(parents=True, exist_ok=True)
        self._log = out.with_name(out.name + ".log.jsonl").open("a")
        self._started = time.time()
        self._sums, self._count = [0.0, 0.0], 0

    def add(self, step: int, loss: float, label_loss: float) -> None:
        self._sums = [self._sums[0] + loss, self._sums[1] + label_loss]
        self._count += 1
        if (step + 1) % 50 == 0:
            entry = {
                "step": step + 1,
                "loss": round(self._sums[0] / self._count, 5),
                "label_loss": round(self._sums[1] / self._count, 4),
                "seconds": round(time.time() - self._started),
                "cpu_seconds": round(time.process_time()),
            }
            print(json.dumps(entry), flush=True)
            print(json.dumps(entry), file=self._log, flush=True)
            self._sums, self._count = [0.0, 0.0], 0


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo model.")
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the checkpoint")
    add("--steps", type=int, default=8000)
    add("--decay", type=int, default=3000, help="last steps, with a falling learning rate")
    add("--batch", type=int, default=16, help="rows of a step, up to 12 questions each")
    add("--init", type=Path, help="a checkpoint to start from instead of random weights")
    add("--resume", type=Path, help="a .state.pt of an interrupted run with the same arguments")
    add("--muon-rate", type=float, default=5e-3)
    add("--adam-rate", type=float, default=3e-3)
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=1)
    add("--save-every", type=int, default=250)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    train(parse_args())
