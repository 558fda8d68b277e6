"""OpenVINO GenAI with continuous batching, in process. Runs in its own environment.

    VENV/bin/python -m bench.peers.openvino_generate MODEL [--threads 2] [--rounds 3]

Prints medians: ms a token and TTFT, of one request; tokens and requests a second of 8 at once.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

from bench.peers.openvino_engine import open_engine

WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world")
Timed = tuple[float, float, int]
"""(first token, last token, tokens) of a request; s after the start."""


class Pipeline:
    """The engine, asked with words and noise."""

    def __init__(self, model: str, threads: int) -> None:
        self._engine = open_engine(model, threads)
        self._ids = iter(range(1 << 30))

    def run(self, count: int, words: int, side: int, tokens: int) -> tuple[list[Timed], float]:
        """`count` requests at once; their times and the whole time."""
        start = time.perf_counter()
        handles = [self._add(words, side, tokens) for _ in range(count)]
        first, last, seen = [0.0] * count, [0.0] * count, [0] * count
        while self._engine.has_non_finished_requests():
            self._engine.step()
            now = time.perf_counter() - start
            for place, handle in enumerate(handles):
                if handle.can_read():
                    first[place] = first[place] or now
                    last[place] = now
                    seen[place] += sum(len(out.generated_ids) for out in handle.read().values())
        return list(zip(first, last, seen, strict=True)), time.perf_counter() - start

    def _add(self, words: int, side: int, tokens: int) -> Any:
        import openvino_genai as genai

        config = genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.ignore_eos = tokens, False, True
        text = " ".join(random.choices(WORDS, k=words))
        pictures = [_noise(side)] if side else []
        return self._engine.add_request(next(self._ids), text, pictures, config)


def _noise(side: int) -> Any:
    import numpy
    import openvino

    return openvino.Tensor(numpy.random.randint(0, 256, (1, side, side, 3), dtype=numpy.uint8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    pipeline = Pipeline(given.model, given.threads)
    for name, words, side, tokens in (
        ("text", 80, 0, 48), ("1 picture", 80, 448, 2), ("1k text", 1000, 0, 2),
    ):  # fmt: skip
        seen = [pipeline.run(1, words, side, tokens)[0][0] for _ in range(given.rounds + 1)][1:]
        first = statistics.median(f for f, _, _ in seen)
        each = statistics.median((last - f) / (n - 1) for f, last, n in seen)
        print(f"{name}: TTFT {first:.2f} s, {each * 1e3:.1f} ms a token")
    for name, side in (("text", 0), ("1 picture", 448)):
        runs = [pipeline.run(8, 80, side, 32) for _ in range(given.rounds + 1)][1:]
        tokens_s = statistics.median(sum(n for *_, n in each) / wall for each, wall in runs)
        print(f"8 at once, {name}: {tokens_s:.1f} tokens/s, {tokens_s / 32:.3f} requests/s")


if __name__ == "__main__":
    main()
