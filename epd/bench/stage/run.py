"""Puts the cases of a run together, runs them interleaved, prints and writes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from epd.bench.machine import environment
from epd.bench.report import markdown, write
from epd.bench.stage.case import HEAD, Case, cells, interleave, row
from epd.bench.stage.compute import Sizes

PARTS = ("compute", "handoff", "transfer")


@dataclass(frozen=True, slots=True)
class Options:
    checkpoint: str
    threads: int = 1
    rounds: int = 9
    parts: tuple[str, ...] = PARTS
    kernels_off: bool = False
    """Measure the language model and the tower without compiled kernels too."""
    int8: bool = False
    """Measure the language model with int8 weights too, beside a read of as many bytes."""
    pause_s: float = 0.1
    """Before each run of `transfer`. The kernel's view of how busy the cores are halves in
    32 ms, and goes into whether it wakes the two ends of a connection on one core or on two:
    without a pause a run inherits that from whatever ran before it."""
    sizes: Sizes = field(default_factory=Sizes)


def run(options: Options, tell: Callable[[str], None]) -> dict[str, Any]:
    """All parts, one after the other; each part's cases interleaved."""
    found: dict[str, Any] = {"environment": environment(), "threads": options.threads}
    rng = random.Random(0)
    for part in options.parts:
        with _cases(part, options) as cases:
            interleave(cases, options.rounds, rng, options.pause_s if part == "transfer" else 0.0)
            found[part] = [row(case) for case in cases]
        tell(f"\n{part}: {options.rounds} rounds, {options.threads} threads\n")
        tell(markdown(HEAD, [cells(one) for one in found[part]]))
        if part == "handoff":
            tell(f"\n{hand_off(found[part])}")
    return found


def hand_off(rows: Sequence[dict[str, Any]]) -> str:
    """Share of prefill's time, from the rows of that part."""
    share = sum(one["ratio"] for one in rows if one["ratio"] is not None)
    return f"hand-off: {share:.1%} of the prompt's prefill, if nothing overlapped"


def save(path: Path, found: dict[str, Any]) -> None:
    write(path, orjson.dumps(found, option=orjson.OPT_INDENT_2))


def _cases(part: str, options: Options) -> AbstractContextManager[list[Case]]:
    return {"compute": _compute, "handoff": _handoff, "transfer": _transfer}[part](options)


@contextmanager
def _compute(options: Options) -> Iterator[list[Case]]:
    from epd.bench.stage.compute import encode_case, gemm_case, language_cases, read_case
    from epd.models.lm import LanguageModel

    path, threads, sizes = options.checkpoint, options.threads, options.sizes
    lm = LanguageModel.load(path, threads=threads)
    read, gemm = read_case(lm, threads), gemm_case(lm)
    cases = [read, gemm, *language_cases(lm, sizes, read, gemm)]
    cases.append(encode_case(path, threads, sizes, gemm, "auto"))
    if options.kernels_off:
        plain = LanguageModel.load(path, threads=threads, kernels="off")
        cases += language_cases(plain, sizes, read, gemm, ", kernels off")
        cases.append(encode_case(path, threads, sizes, gemm, "off"))
    if options.int8:
        small = LanguageModel.load(path, threads=threads, quantize="int8")
        least = read_case(small, threads)
        cases += [least, *language_cases(small, sizes, least, gemm, ", int8")]
    yield cases


@contextmanager
def _handoff(options: Options) -> Iterator[list[Case]]:
    from epd.bench.stage.handoff import handoff_cases
    from epd.models.lm import LanguageModel

    lm = LanguageModel.load(options.checkpoint, threads=options.threads)
    with handoff_cases(lm) as cases:
        yield cases


@contextmanager
def _transfer(options: Options) -> Iterator[list[Case]]:
    from epd.bench.stage.transfer import transfer_cases

    with ExitStack() as stack:
        yield stack.enter_context(transfer_cases())
