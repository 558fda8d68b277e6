"""transformers' `generate` in process: the plainest rival. Runs in its own environment.

    VENV/bin/python bench/peers/generate.py CHECKPOINT [--threads 2] [--rounds 3]

Prints medians: TTFT of a picture of 448 x 448 and of a text of 1,000 words, and ms a token
after it, batch 1.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from typing import Any

WORDS = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
]
TOKENS = 48


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": str(given.threads), "HF_HUB_OFFLINE": "1"}

    import torch
    import transformers

    torch.set_num_threads(given.threads)
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(
        given.checkpoint, dtype=torch.bfloat16
    )
    processor: Any = transformers.AutoProcessor.from_pretrained(given.checkpoint)
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    for name, words, side in (("1 picture", 80, 448), ("1k text", 1000, 0), ("text", 80, 0)):
        seen = [measure(model, processor, words, side) for _ in range(given.rounds + 1)][1:]
        first, each = (statistics.median(column) for column in zip(*seen, strict=True))
        print(f"{name}: TTFT {first * 1e3:.0f} ms, {each * 1e3:.1f} ms a token")


def measure(model: Any, processor: Any, words: int, side: int) -> tuple[float, float]:
    """(seconds to the first token, seconds a token after it); content is new each time."""
    import torch

    inputs = prompt(processor, words, side)
    times = []
    for tokens in (1, TOKENS):
        start = time.perf_counter()
        with torch.inference_mode():
            model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        times.append(time.perf_counter() - start)
    return times[0], (times[1] - times[0]) / (TOKENS - 1)


def prompt(processor: Any, words: int, side: int) -> Any:
    """As its chat template makes it."""
    import torch
    from PIL import Image

    text = " ".join(random.choices(WORDS, k=words))
    content: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if side:
        noise = torch.randint(0, 256, (side, side, 3), dtype=torch.uint8).numpy()
        content.insert(0, {"type": "image", "image": Image.fromarray(noise)})
    return processor.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt",
    )  # fmt: skip


if __name__ == "__main__":
    main()
