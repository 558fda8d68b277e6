"""Split == transformers' generate() for models of other shapes: windows that are shorter than the
prompt, heads that divide nothing, one key/value head for all, biases, odd vocabularies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parity.conversations import CASES
from tests.parity.split import WHOLE, Split
from tests.tiny import reference_generate
from tests.tiny.build import build
from tests.tiny.shapes import SHAPES

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=SHAPES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, text = SHAPES[request.param]
    return build(family, tmp_path_factory.mktemp("shapes"), **text)


@pytest.mark.parametrize("exact", [False, True])
def test_split_equals_generate(path: Path, exact: bool) -> None:
    split = Split(path, exact=exact)
    requests, wanted = [], []
    for messages, images in CASES.values():
        reference = reference_generate(path, messages, images, 24, eos_token_id=None)
        assert len(set(reference.ids)) > 2
        requests.append(split.request(reference.prompt_ids, images, reference.ids))
        wanted.append(reference)
    split.run(requests, 7 if exact else WHOLE)
    for request, reference in zip(requests, wanted, strict=True):
        logits = torch.stack(request.logits)
        assert (logits - reference.logits).abs().max() < TOLERANCE
        for chosen, right, gap in zip(
            logits.argmax(-1).tolist(), reference.ids, reference.gaps(), strict=True
        ):
            assert chosen == right or gap <= TOLERANCE
