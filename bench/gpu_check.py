"""`make gpu-check`: what can only be seen on a CUDA device, in a few minutes, on one card.

    python -m bench.gpu_check [--checkpoint FOLDER] [--out gpu-check.md]

1. Tests: attention compiled (tests/unit/test_gpu_attention.py), parity with transformers,
   graphs, the mirror and its checksums, and three processes that answer the demo questions
   (tests/gpu).
2. Decode beside the bandwidth floor: a step of 1, 8 and 32 sequences of a 0.5B model in
   bfloat16, with and without CUDA graphs, beside one pass over as many bytes as the step
   has to read. Interleaved, medians.

The result is a page of Markdown, written part by part. Without a CUDA device it says so and ends
with code 3; with code 1 where a test or a part failed.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.flags import flag_parser
from epd.kv.pool import KvPool
from epd.models.lm import ForwardBatch, LanguageModel, SequenceSlice

ROOT = Path(__file__).resolve().parent.parent
TESTS = ("tests/unit/test_gpu_attention.py", "tests/gpu")
TEST_LIMIT_S = 200
NO_DEVICE = 3
BATCHES = (1, 8, 32)
CONTEXT = 1024
BLOCK_TOKENS = 256
ROUNDS = 30


@dataclass
class Case:
    """Something that is run once a round."""

    name: str
    run: Callable[[], object]
    nbytes: int
    ms: list[float] = field(default_factory=list)

    def once(self) -> None:
        timed: Any = torch.cuda.Event  # has no types
        start, end = (timed(enable_timing=True) for _ in range(2))
        start.record()
        self.run()
        end.record()
        end.synchronize()
        self.ms.append(start.elapsed_time(end))


def main() -> int:
    parser = flag_parser(__doc__)
    parser.add_argument("--checkpoint", type=Path, help="default: a random one is built")
    parser.add_argument("--out", type=Path, default=Path("gpu-check.md"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: not run")
        return NO_DEVICE
    parts = {
        "Machine": _machine,
        "Tests": _tests,
        "Decode and the bandwidth floor": lambda: _decode(args.checkpoint),
    }
    return 0 if report(args.out, parts) else 1


Part = Callable[[], tuple[bool, list[str]]]
"""(whether all is well, lines of Markdown)."""


def report(out: Path, parts: Mapping[str, Part]) -> bool:
    """Whether all parts went well. What one has found is in the file before the next begins: a
    part that raises has failed, one that ends the process is left as `not ended`."""
    passed, text = True, f"# GPU check, {time.strftime('%Y-%m-%d')}\n"
    for title, part in parts.items():
        out.write_text(f"{text}\n## {title}\n\nnot ended\n")
        began = time.monotonic()
        try:
            well, lines = part()
        except Exception:  # whatever it is, the others' results are worth having
            well, lines = False, ["**failed**", "", "```", traceback.format_exc().strip(), "```"]
        passed &= well
        told = "\n".join([f"\n## {title}", "", *lines, f"\n{time.monotonic() - began:.0f} s"])
        print(told, flush=True)
        text += f"{told}\n"
        out.write_text(text)
    return passed


def _machine() -> tuple[bool, list[str]]:
    found = torch.cuda.get_device_properties(0)
    return True, [
        f"{found.name}, {found.total_memory >> 30} GiB; torch {torch.__version__}, "
        f"CUDA {torch.version.cuda}, driver as installed"
    ]


def _tests() -> tuple[bool, list[str]]:
    """(whether all passed, what pytest says of each)."""
    command = [sys.executable, "-m", "pytest", "-rA", "-q", "--tb=short", "--no-header", *TESTS]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=TEST_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return False, [f"**failed**: not done within {TEST_LIMIT_S} s"]
    lines = done.stdout.splitlines()
    kinds = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL")
    told = [line for line in lines if line.startswith(kinds)]
    last = lines[-1] if lines else done.stderr.strip()[-500:]
    return done.returncode == 0, [f"{last}\n", *[f"- {line}" for line in told]]


def _decode(checkpoint: Path | None) -> tuple[bool, list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint or _built(Path(folder) / "checkpoint")
        cases = _cases(path)
        for case in cases:
            for _ in range(3):
                case.run()
        for _ in range(ROUNDS):
            for case in random.sample(cases, len(cases)):
                case.once()
    return True, _table(cases)


def _built(path: Path) -> Path:
    """The random 0.5B checkpoint of bench/make_checkpoint.py."""
    command = [sys.executable, str(ROOT / "bench" / "make_checkpoint.py"), str(path)]
    subprocess.run(command, check=True, capture_output=True)
    return path


def _cases(path: Path) -> list[Case]:
    lm = LanguageModel.load(path, device="cuda", block_tokens=BLOCK_TOKENS)
    blocks = max(BATCHES) * lm.kv_layout.blocks_for(CONTEXT)
    plain, pool = (KvPool(lm.kv_layout, blocks, "cuda") for _ in range(2))
    lm.prepare_decode(pool, max(BATCHES), CONTEXT)
    linears = [module for module in lm.model.modules() if isinstance(module, nn.Linear)]
    weights = sum(x.in_features * x.out_features for x in linears) * linears[0].weight.itemsize
    cases = []
    for count in BATCHES:
        nbytes = weights + count * CONTEXT * lm.kv_layout.token_bytes
        memory = torch.ones(nbytes // 4, dtype=torch.float32, device="cuda")
        cases.append(Case(f"floor {count}", memory.sum, nbytes))
        for name, where in (("graph", pool), ("eager", plain)):
            cases.append(Case(f"{name} {count}", _step(lm, where, count), nbytes))
    return cases


def _step(lm: LanguageModel, pool: KvPool, count: int) -> Callable[[], object]:
    each = lm.kv_layout.blocks_for(CONTEXT)
    batch = ForwardBatch(
        torch.arange(count) + 10,
        lm.continuation(CONTEXT - 1, 1, 0).repeat(1, count),
        [SequenceSlice(1, CONTEXT, range(i * each, (i + 1) * each)) for i in range(count)],
        range(count),
    )
    return lambda: lm.forward(batch, pool)


def _table(cases: list[Case]) -> list[str]:
    medians = {case.name: statistics.median(case.ms) for case in cases}
    rows = ["| case | MiB to read | median ms | GB/s | x the floor |", "|---|---|---|---|---|"]
    for case in cases:
        ms, floor = medians[case.name], medians[f"floor {case.name.split()[1]}"]
        mib, rate = case.nbytes / 2**20, case.nbytes / ms / 1e6
        rows.append(f"| {case.name} | {mib:.0f} | {ms:.3f} | {rate:.0f} | {ms / floor:.2f} |")
    return rows


if __name__ == "__main__":
    sys.exit(main())
