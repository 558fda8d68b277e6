"""Four real processes over Mooncake against transformers' generate(), token for token.

Every family, float32, greedy: the same ids wherever the reference's two best logits are
more than 1e-4 apart, and log-probabilities within 1e-4, for all conversations at once
and for prefill chunks of 1, 7, 64 tokens and larger than any prompt.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from protos.epd.v1 import gateway_pb2, gateway_pb2_grpc
from tests.conftest import TinyCheckpoint
from tests.e2e.cluster import Cluster
from tests.parity.conversations import CONCURRENT, Conversation
from tests.tiny import FAMILIES, Reference, reference_generate

TIE = 1e-4
TOLERANCE = 1e-4
NEW_TOKENS = 12
WHOLE = 4096
CHUNKS = (1, 7, 64, WHOLE)


def _request(conversation: Conversation) -> gateway_pb2.ChatRequest:
    messages, images = conversation
    rest = iter(images)
    request = gateway_pb2.ChatRequest(
        options=gateway_pb2.GenerationOptions(
            temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=True
        )
    )
    for message in messages:
        said = request.messages.add(role=gateway_pb2.ROLE_USER)
        for part in message["content"]:
            if part["type"] == "image":
                png = io.BytesIO()
                next(rest).save(png, "PNG")
                said.parts.add(image=png.getvalue())
            else:
                said.parts.add(text=part["text"])
    return request


def _ask(address: str, conversation: Conversation) -> tuple[int, list[Any]]:
    """(prompt tokens, output tokens)."""
    with grpc.insecure_channel(address) as channel:
        stub = gateway_pb2_grpc.GatewayStub(channel)
        tokens: list[Any] = []
        prompt_tokens = 0
        for event in stub.Chat(_request(conversation), timeout=120):
            prompt_tokens = event.accepted.prompt_tokens or prompt_tokens
            tokens += event.delta.tokens
        return prompt_tokens, tokens


def _compare(answer: tuple[int, list[Any]], reference: Reference) -> int:
    """Assert equality up to the first tie; returns how many tokens were compared."""
    prompt_tokens, tokens = answer
    assert prompt_tokens == len(reference.prompt_ids)
    assert len(tokens) == len(reference.ids) == NEW_TOKENS
    expected = torch.log_softmax(reference.logits, -1)
    for step, (token, gap) in enumerate(zip(tokens, reference.gaps(), strict=True)):
        if token.id != reference.ids[step]:
            assert gap <= TIE, f"step {step}: {token.id} for {reference.ids[step]}, gap {gap}"
            return step
        assert abs(token.logprob - float(expected[step, token.id])) <= TOLERANCE
    return len(tokens)


def _set_chunk(cluster: Cluster, tokens: int) -> None:
    """Holds from prefill's next start on."""
    step = WHOLE if tokens == WHOLE else 512
    cluster.worker("prefill").settings |= {
        "prefill.chunk_tokens": str(tokens),
        "prefill.step_tokens": str(step),
    }


def _ask_all(cluster: Cluster, references: Sequence[Reference]) -> None:
    """All conversations at once, compared with what generate() says to each."""
    with ThreadPoolExecutor(len(CONCURRENT)) as pool:
        answers = list(pool.map(lambda c: _ask(cluster.grpc_address, c), CONCURRENT))
    compared = [
        _compare(answer, reference) for answer, reference in zip(answers, references, strict=True)
    ]
    # Ties are rare: if most were cut short, the comparison would prove nothing.
    assert sum(compared) > 0.8 * NEW_TOKENS * len(CONCURRENT), compared
    cluster.assert_clean()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_pipeline_answers_as_generate_does(
    family: str, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    path = tiny_checkpoint(family)
    references = [
        reference_generate(path, messages, images, NEW_TOKENS, eos_token_id=None)
        for messages, images in CONCURRENT
    ]
    cluster = Cluster(tmp_path, checkpoint=path, settings={"kv.block_tokens": 16})
    _set_chunk(cluster, CHUNKS[0])
    try:
        cluster.start()
        _ask_all(cluster, references)
        for chunk in CHUNKS[1:]:
            _set_chunk(cluster, chunk)
            assert cluster.worker("prefill").end() == 0  # it, and nothing else, restarts
            cluster.restart("prefill")
            _ask_all(cluster, references)
    finally:
        cluster.close()
