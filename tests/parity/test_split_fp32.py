"""Split in three parts == transformers' generate(), in float32, for every family."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from tests.parity.conversations import CASES, CONCURRENT, THREE_IMAGES, Conversation
from tests.parity.split import WHOLE, Request, Split
from tests.tiny import FAMILIES, Reference, reference_forced, reference_generate

TOLERANCE = 1e-4
NEW_TOKENS = 12


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint(request.param)


@pytest.fixture(scope="module")
def split(path: Path) -> Split:
    return Split(path)


@lru_cache(maxsize=64)
def _answer(path: Path, key: int) -> Reference:
    messages, images = _ALL[key]
    return reference_generate(path, messages, images, NEW_TOKENS, eos_token_id=None)


_ALL = [*CASES.values(), *CONCURRENT]


def _request(split: Split, path: Path, case: Conversation) -> tuple[Request, Reference]:
    reference = _answer(path, _ALL.index(case))
    return split.request(reference.prompt_ids, case[1], reference.ids), reference


def _compare(request: Request, reference: Reference) -> None:
    logits = torch.stack(request.logits)
    assert (logits - reference.logits).abs().max() < TOLERANCE
    for chosen, wanted, gap in zip(
        logits.argmax(-1).tolist(), reference.ids, reference.gaps(), strict=True
    ):
        assert chosen == wanted or gap <= TOLERANCE


@pytest.mark.parametrize("chunk", [1, 7, 64, WHOLE])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_split_equals_generate(split: Split, path: Path, case: Conversation, chunk: int) -> None:
    request, reference = _request(split, path, case)
    assert len(set(reference.ids)) > 2, "an answer that repeats one token proves little"
    split.run([request], chunk)
    _compare(request, reference)


@pytest.mark.parametrize("chunk", [1, 7, 64, WHOLE])
def test_eight_concurrent_requests(split: Split, path: Path, chunk: int) -> None:
    pairs = [_request(split, path, case) for case in CONCURRENT]
    assert len({len(request.prompt_ids) for request, _ in pairs}) >= len(pairs) - 1
    split.run([request for request, _ in pairs], chunk)
    for request, reference in pairs:
        _compare(request, reference)


def test_prompt_chunks_and_decode_rows_in_one_forward(split: Split, path: Path) -> None:
    """A colocated worker: one request decodes while another's prompt is computed."""
    (first, wanted), (second, other) = (
        _request(split, path, CASES[name]) for name in ("one image", "three images")
    )
    split.run_prefill([first], WHOLE)
    worker = split.prefill
    while second.computed < len(second.prompt_ids):
        n = min(16, len(second.prompt_ids) - second.computed)
        work = [(second, n)]
        if len(first.logits) < len(first.forced_ids):
            work.insert(0, (first, 1))
        *rest, last = worker.step(work)
        first.logits += [logits[-1] for logits in rest]
    second.logits.append(last[-1])
    for request in (first, second):
        split.hand_over(request)
    split.run_decode([first, second])
    _compare(first, wanted)
    _compare(second, other)
    for request in (first, second):
        split.decode.free(request)


def test_failover_computes_generated_ids_again(split: Split, path: Path) -> None:
    """Generated ids, prefilled after the prompt, get the logits of the first attempt."""
    request, reference = _request(split, path, THREE_IMAGES)
    again = split.request(request.prompt_ids, THREE_IMAGES[1], request.forced_ids)
    (logits,) = split.prefill.step([(again, len(again.token_ids))])
    split.prefill.free(again)
    computed = logits[len(again.prompt_ids) - 1 : -1]
    assert (computed - reference.logits).abs().max() < TOLERANCE


@pytest.mark.parametrize("wrong", ["rows", "order", "positions"])
def test_the_comparison_notices(split: Split, path: Path, wrong: str) -> None:
    """Negative control: each of these faults is far outside the tolerance."""
    request, reference = _request(split, path, THREE_IMAGES)
    assert request.rows is not None
    if wrong == "rows":
        request.rows = request.rows.roll(1, 1)
    elif wrong == "order":
        request.rows = request.rows.flip(1)
    else:
        request.positions = request.positions + (torch.arange(request.positions.shape[1]) > 20)
    split.run([request], WHOLE)
    assert (torch.stack(request.logits) - reference.logits).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("case", [CASES["text"], THREE_IMAGES], ids=["text", "three images"])
def test_generated_placeholder_is_an_ordinary_token(
    split: Split, path: Path, case: Conversation
) -> None:
    """A random model samples the image token id now and then; no image belongs to it."""
    image = split.prefill.lm.spec.image_token_id
    forced = [5, image, 7, image, image, 9]
    reference = reference_forced(path, *case, forced)
    alone, again, beside = (split.request(reference.prompt_ids, case[1], forced) for _ in range(3))
    split.run([alone], WHOLE)
    assert (torch.stack(alone.logits) - reference.logits).abs().max() < TOLERANCE
    # After a failover, in one chunk with the prompt's real images, and another's.
    prompt = len(again.prompt_ids)
    rows, _ = split.prefill.step([(again, len(again.token_ids)), (beside, prompt - 3)])
    assert (rows[prompt - 1 : -1] - reference.logits).abs().max() < TOLERANCE
    for request in (again, beside):
        split.prefill.free(request)


def test_exact_mode_equals_generate_too(path: Path) -> None:
    """Exact is another order of the same sums, and holds in float32 as well."""
    exact = Split(path, exact=True)
    (chunked, reference), (whole, _) = (_request(exact, path, THREE_IMAGES) for _ in range(2))
    exact.run([chunked], 7)
    _compare(chunked, reference)
    exact.run([whole], WHOLE)
    assert torch.equal(torch.stack(whole.logits), torch.stack(chunked.logits))
