"""Exact mode in bfloat16: the same bits whatever the batch and the chunks."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.parity.conversations import CASES, CONCURRENT, THREE_IMAGES, Conversation
from tests.parity.split import WHOLE, Request, Split
from tests.tiny import FAMILIES
from tests.tiny.reference import reference_inputs

DEMO = Path(__file__).parents[2] / "demo" / "checkpoint"
NEW_TOKENS = 10


# With the compiled kernels, where this machine has them, and by torch alone.
ARMS = [(name, kernels) for kernels in ("auto", "off") for name in (*FAMILIES, "demo")]


@pytest.fixture(scope="module", params=ARMS, ids="-".join)
def split(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> Split:
    name, kernels = request.param
    path = DEMO if name == "demo" else tiny_checkpoint(name, "bfloat16")
    made = Split(path, exact=True, kernels=kernels)
    assert made.prefill.lm.spec.dtype == "bfloat16"
    return made


def _request(split: Split, case: Conversation, seed: int = 0) -> Request:
    messages, images = case
    ids = reference_inputs(split.prefill.lm.spec.path, messages, images)["input_ids"][0].tolist()
    forced = random.Random(seed).choices(range(split.prefill.lm.spec.vocab_size), k=NEW_TOKENS)
    return split.request(ids, images, forced)


def _every_row(split: Split, request: Request, chunk: int) -> tuple[Tensor, list[bytes]]:
    """Logits of all rows of prompt and forced ids, and the bytes of their blocks."""
    rows: list[Tensor] = []
    while request.computed < len(request.token_ids):
        n = min(chunk, len(request.token_ids) - request.computed)
        rows += split.prefill.step([(request, n)])
    pool = split.prefill.pool
    pool.zero_tail(request.blocks[-1], (request.computed - 1) % 16 + 1)
    content = [bytes(pool.block_bytes_view(block).numpy()) for block in request.blocks]
    split.prefill.free(request)
    return torch.cat(rows), content


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_chunks_change_no_bit(split: Split, case: Conversation) -> None:
    wanted, wanted_blocks = _every_row(split, _request(split, case), WHOLE)
    assert wanted.isfinite().all()
    for chunk in (1, 7, 64):
        logits, blocks = _every_row(split, _request(split, case), chunk)
        assert torch.equal(logits, wanted)
        assert blocks == wanted_blocks


def test_batch_changes_no_bit(split: Split) -> None:
    """Each of 8 requests, prefilled and decoded together, has the bits it has alone."""
    together = [_request(split, case, i) for i, case in enumerate(CONCURRENT)]
    split.run(together, 7)
    for i, (case, batched) in enumerate(zip(CONCURRENT, together, strict=True)):
        alone = _request(split, case, i)
        split.run([alone], WHOLE)
        assert torch.equal(torch.stack(batched.logits), torch.stack(alone.logits))


def test_other_image_other_bits(split: Split) -> None:
    """Negative control: the comparison above can fail."""
    one = _request(split, THREE_IMAGES)
    other = _request(split, THREE_IMAGES)
    assert other.rows is not None
    other.rows = other.rows.roll(1, 1)
    assert not torch.equal(_every_row(split, one, WHOLE)[0], _every_row(split, other, WHOLE)[0])


def test_fast_mode_is_not_exact(tiny_checkpoint: Callable[..., Path]) -> None:
    """Why exact mode exists: by torch alone, chunks change bits. If this fails, drop it."""
    fast = Split(tiny_checkpoint("qwen3_vl", "bfloat16"), kernels="off")
    whole, _ = _every_row(fast, _request(fast, THREE_IMAGES), WHOLE)
    chunked, _ = _every_row(fast, _request(fast, THREE_IMAGES), 7)
    assert not torch.equal(whole, chunked)
