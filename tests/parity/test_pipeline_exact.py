"""Exact mode in bfloat16 through four real processes: the same floats in the JSON whatever
else runs and however the prompt is cut.

Every family and every logit is compared in one process (test_exact_bf16.py); here it is
what a client sees that is compared: token, bytes, logprob and the 20 largest logprobs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TinyCheckpoint
from tests.e2e.cluster import Cluster
from tests.parity.conversations import CONCURRENT, Conversation
from tests.parity.service import WHOLE, body, change_chunk, service

NEW_TOKENS = 10
CHUNKS = (WHOLE, 7, 64)
"""Each with a new prefill, which has computed nothing yet."""
OPTIONS = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
# One with mRoPE and deepstack, one that tiles pictures, one of another kind of positions.
FAMILIES = (
    "qwen3_vl",
    *(pytest.param(family, marks=pytest.mark.long) for family in ("llava_onevision", "idefics3")),
)


def _ask(cluster: Cluster, conversation: Conversation) -> str:
    """All that the answer says of its tokens; equal text is equal bits, as JSON has the
    shortest decimal that gives the same float."""
    reply = cluster.chat(body(conversation, model=cluster.model, **OPTIONS))
    assert reply.status == 200, reply
    content: list[dict[str, Any]] = reply.json["choices"][0]["logprobs"]["content"]
    assert len(content) == NEW_TOKENS
    assert all(len(entry["top_logprobs"]) == 20 for entry in content)
    return json.dumps(content)


def _together(cluster: Cluster, conversations: Sequence[Conversation]) -> list[str]:
    with ThreadPoolExecutor(len(conversations)) as pool:
        return list(pool.map(lambda conversation: _ask(cluster, conversation), conversations))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("family", FAMILIES)
def test_neither_company_nor_chunks_change_a_bit(
    family: str, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    path = tiny_checkpoint(family, "bfloat16")
    with service(tmp_path, path, CHUNKS[0], {"model.exact": True}) as cluster:
        alone = [_ask(cluster, conversation) for conversation in CONCURRENT]
        assert len(set(alone)) == len(alone)  # else equality would prove little
        for chunk in CHUNKS:
            change_chunk(cluster, chunk)
            assert _together(cluster, CONCURRENT[::-1]) == alone[::-1]
        cluster.assert_clean()
