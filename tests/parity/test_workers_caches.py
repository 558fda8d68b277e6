"""Prefill and decode workers with a real model, in one process: caches change no bit.

Exact mode in bfloat16. What each prompt is answered is computed once where nothing is kept,
then asked of a pair of workers with caches and small pools, in random order and company.
The processes themselves, over Mooncake: test_pipeline_caches.py.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from epd.models.lm import LanguageModel
from tests.conftest import TinyCheckpoint
from tests.parity.workers import BLOCK, COLD, Pair, prompts


@pytest.fixture(scope="module")
def lm(tiny_checkpoint: TinyCheckpoint) -> LanguageModel:
    path: Path = tiny_checkpoint("qwen3_vl", "bfloat16")
    return LanguageModel.load(path, exact=True, block_tokens=BLOCK)


async def test_caches_change_no_bit_in_any_order(lm: LanguageModel) -> None:
    asked = prompts(lm.spec.image_token_id)
    cold = Pair(lm, kv__prefill_tokens=512, kv__decode_tokens=512, **COLD).start()
    right = [await cold.ask(prompt) for prompt in asked]
    await cold.shut_down()
    assert cold.cached == 0
    assert len({repr(tokens) for tokens in right}) == len(asked), "pictures must matter"

    warm = Pair(lm, kv__prefill_tokens=200, kv__decode_tokens=240, prefill__chunk_tokens=11)
    warm.start()
    chance = random.Random(11)
    for _ in range(12):
        numbers = [chance.randrange(len(asked)) for _ in range(4)]
        answers = await asyncio.gather(*(warm.ask(asked[number]) for number in numbers))
        for number, answer in zip(numbers, answers, strict=True):
            assert answer == right[number], asked[number]
    assert warm.cached > 200
    for worker in (warm.prefill, warm.decode):
        assert worker._kv.blocks.kept > 10
    await warm.shut_down()
