"""How far a decode step is from reading the weights once, and a chunk from a bare GEMM.

    python -m bench.decode_floor CHECKPOINT [--threads 1] [--rounds 15] [--context 256]
                                            [--chunk 512] [--off] [--json FILE]

One process and one model, everything interleaved: each round runs every case once, in
random order, so that drift of the machine and other work on it hit all alike.

- *floor*: a kernel that reads as many bytes as the linear layers' weights have, from
  memory of the same kind, with the same threads, and does nothing else.
- *decode B*: a forward of B sequences, one token each, after `--context` tokens, with
  logits of every row. Its ratio is to the floor.
- *GEMM*: a large bfloat16 (or float32) matrix product by torch.
- *prefill*, *encode*: a chunk of `--chunk` tokens, a picture of 448 x 448. Their ratio
  is their own floating-point operations a second to the GEMM's.

`--off` measures the same again without the compiled kernels, `--int8` with int8 weights
and a floor of as many bytes as those have. Times are wall-clock; with
one thread the CPU time is given too, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from epd.kv.pool import KvPool
from epd.models.encoder import VisionEncoder
from epd.models.kernels import build
from epd.models.kernels.linear import LinearKernel
from epd.models.kernels.memory import huge_pages
from epd.models.lm import ForwardBatch, LanguageModel, SequenceSlice
from epd.models.processor import PreparedImage, Processor
from epd.models.quantize import GROUP

BATCHES = (1, 4, 8, 16)
SIDE = 448


@dataclass
class Case:
    """Something that is run once a round."""

    name: str
    run: Callable[[], object]
    flops: float = 0.0
    base: Case | None = None
    """What its ratio is to; None: itself."""
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def once(self) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        self.run()
        self.cpu.append(time.process_time() - cpu)
        self.wall.append(time.perf_counter() - wall)


def main() -> None:
    args = _arguments()
    lm = LanguageModel.load(args.checkpoint, threads=args.threads)
    floor, gemm = _floor(lm, args.threads), _gemm(lm)
    cases = [floor, gemm, *_language(lm, args, "", floor, gemm)]
    if args.off:
        plain = LanguageModel.load(args.checkpoint, threads=args.threads, kernels="off")
        cases += [*_language(plain, args, ", kernels off", floor, gemm), _encode(args, "off", gemm)]
    if args.int8:
        small = LanguageModel.load(args.checkpoint, threads=args.threads, quantize="int8")
        least = _floor(small, args.threads)
        cases += [least, *_language(small, args, ", int8", least, gemm)]
    cases.append(_encode(args, "auto", gemm))
    for case in cases:
        case.run()
    for _ in range(args.rounds):
        for case in random.sample(cases, len(cases)):
            case.once()
    print(f"{lm.numerics_id}; {args.rounds} rounds; context {args.context}\n")
    rows = [_row(case, args.threads) for case in cases]
    _print(rows)
    if args.json:
        args.json.write_text(json.dumps({"numerics": lm.numerics_id, "rows": rows}, indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--off", action="store_true")
    parser.add_argument("--int8", action="store_true")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _linears(lm: LanguageModel) -> list[nn.Linear]:
    return [module for module in lm.model.modules() if isinstance(module, nn.Linear)]


def _floor(lm: LanguageModel, threads: int) -> Case:
    itemsize = getattr(torch, lm.spec.dtype).itemsize
    each = itemsize if lm.quantize == "off" else 1 + itemsize / GROUP  # a scale for each group
    weights = sum(linear.in_features * linear.out_features for linear in _linears(lm))
    nbytes = int(weights * each)
    memory = huge_pages(nbytes // 64 * 64).fill_(1)
    library = build.load()
    name = f"floor: read {nbytes / 2**20:.0f} MiB"
    if library is None:
        words = memory.view(torch.int64)
        return Case(name, lambda: words.sum())
    kernel = LinearKernel(library, threads)
    return Case(name, lambda: kernel.read(memory))


def _gemm(lm: LanguageModel) -> Case:
    a, b = (torch.randn(1536, 1536, dtype=getattr(torch, lm.spec.dtype)) for _ in range(2))
    return Case("GEMM 1536", lambda: a @ b, 2 * 1536**3)


def _language(
    lm: LanguageModel, args: argparse.Namespace, suffix: str, floor: Case, gemm: Case
) -> list[Case]:
    tokens = max(BATCHES) * (args.context + 32) + args.chunk + 32
    pool = KvPool(lm.kv_layout, lm.kv_layout.blocks_for(tokens))
    cases = []
    for count in BATCHES:
        batch = _decode_batch(lm, count, args.context)
        run = partial(lm.forward, batch, pool)
        cases.append(Case(f"decode {count}{suffix}", run, base=floor))
    run, flops = partial(lm.forward, _chunk(lm, args.chunk), pool), _prefill_flops(lm, args.chunk)
    return [*cases, Case(f"prefill {args.chunk}{suffix}", run, flops, gemm)]


def _decode_batch(lm: LanguageModel, count: int, context: int) -> ForwardBatch:
    each = lm.kv_layout.blocks_for(context)
    return ForwardBatch(
        torch.arange(count) + 10,
        lm.continuation(context - 1, 1, 0).repeat(1, count),
        [SequenceSlice(1, context, range(i * each, (i + 1) * each)) for i in range(count)],
        range(count),
    )


def _chunk(lm: LanguageModel, n: int) -> ForwardBatch:
    blocks = range(lm.kv_layout.blocks_for(n))
    ids = torch.randint(10, 1000, (n,))
    return ForwardBatch(ids, lm.continuation(0, n, 0), [SequenceSlice(n, n, blocks)], [n - 1])


def _prefill_flops(lm: LanguageModel, n: int) -> float:
    """Of the linear layers (the head for one row), and of causal attention."""
    config, head = lm.model.config.get_text_config(), lm.model.get_output_embeddings()
    each = [(linear.in_features * linear.out_features, linear is head) for linear in _linears(lm)]
    linear = sum(2 * size * (1 if last else n) for size, last in each)
    dim = lm.kv_layout.layers[0].k_dim
    attention = 4 * n * (n + 1) / 2 * config.num_attention_heads * dim * config.num_hidden_layers
    return float(linear + attention)


def _encode(args: argparse.Namespace, kernels: Literal["auto", "off"], gemm: Case) -> Case:
    encoder = VisionEncoder.load(args.checkpoint, threads=args.threads, kernels=kernels)
    noise = torch.randint(0, 256, (SIDE, SIDE, 3), dtype=torch.uint8).numpy()
    image = Processor.load(args.checkpoint).prepare(Image.fromarray(noise), 1)
    suffix = "" if kernels == "auto" else ", kernels off"
    flops = _encode_flops(args, image)
    return Case(f"encode {SIDE} x {SIDE}{suffix}", lambda: encoder.encode([image]), flops, gemm)


def _encode_flops(args: argparse.Namespace, image: PreparedImage) -> float:
    """Counted in plain products: the counter doesn't know fused attention on CPUs."""
    encoder = VisionEncoder.load(args.checkpoint, threads=args.threads, kernels="off")
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        encoder.encode([image])
    return float(counter.get_total_flops())


def _row(case: Case, threads: int) -> dict[str, Any]:
    base = case.base or case
    median, least = statistics.median(case.wall), min(case.wall)
    row: dict[str, Any] = {"case": case.name, "median ms": median * 1e3, "min ms": least * 1e3}
    if threads == 1:
        row["CPU median ms"] = statistics.median(case.cpu) * 1e3
        row["CPU min ms"] = min(case.cpu) * 1e3
    for how in ("wall", "cpu") if threads == 1 else ("wall",):
        own, other = getattr(case, how), getattr(base, how)
        for name, pick in (("median", statistics.median), ("min", min)):
            ratio = pick(own) / pick(other)
            ratio = case.flops / base.flops / ratio if case.flops else ratio
            row[f"ratio of {how} {name}s"] = ratio
    row["Gflop/s or GB/s"] = case.flops / least / 1e9 if case.flops else 0.0
    return row


def _print(rows: list[dict[str, Any]]) -> None:
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        cells = [f"{x:.2f}" if isinstance(x, float) else str(x) for x in row.values()]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
