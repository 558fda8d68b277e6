"""Four real processes over Mooncake against transformers, in float32, for every family.

Greedy tokens are generate()'s wherever the reference's two best logits are more than 1e-4
apart. At every place of every answer the 20 largest log-probabilities (the API's maximum)
are the reference's within 1e-4, teacher-forced: after a tie that fell the other way the
reference goes on from the pipeline's token. All rows of the vocabulary are compared in one
process, in test_split_fp32.py.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from protos.epd.v1 import gateway_pb2, gateway_pb2_grpc
from tests.conftest import TinyCheckpoint
from tests.e2e.cluster import Cluster
from tests.parity.conversations import ALONE, CONCURRENT, Conversation
from tests.parity.service import WHOLE, change_chunk, png, service
from tests.tiny import FAMILIES, Reference, reference_forced, reference_generate

TOLERANCE = 1e-4
NEW_TOKENS = 12
TOP = 20
CHUNKS = (1, 7, 64, WHOLE)


@dataclass(frozen=True)
class Oracle:
    """What the whole model says to one conversation, whatever the answer was so far."""

    path: Path
    conversation: Conversation
    greedy: Reference

    @classmethod
    def of(cls, path: Path, conversation: Conversation) -> Oracle:
        greedy = reference_generate(path, *conversation, NEW_TOKENS, eos_token_id=None)
        return cls(path, conversation, greedy)

    def after(self, ids: list[int]) -> Reference:
        return self.greedy if ids == self.greedy.ids else self._forced(ids)

    def _forced(self, ids: list[int]) -> Reference:
        return reference_forced(self.path, *self.conversation, ids)


def _request(conversation: Conversation) -> gateway_pb2.ChatRequest:
    messages, images = conversation
    rest = iter(images)
    options = gateway_pb2.GenerationOptions(
        temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=True, top_logprobs=TOP
    )
    request = gateway_pb2.ChatRequest(options=options)
    for message in messages:
        said = request.messages.add(role=gateway_pb2.ROLE_USER)
        for part in message["content"]:
            if part["type"] == "image":
                said.parts.add(image=png(next(rest)))
            else:
                said.parts.add(text=part["text"])
    return request


@dataclass
class Answer:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: list[Any] = field(default_factory=list)


def _ask(address: str, conversation: Conversation) -> Answer:
    answer = Answer()
    with grpc.insecure_channel(address) as channel:
        stub = gateway_pb2_grpc.GatewayStub(channel)
        for event in stub.Chat(_request(conversation), timeout=120):
            answer.prompt_tokens = event.accepted.prompt_tokens or answer.prompt_tokens
            answer.tokens += event.delta.tokens
            answer.cached_tokens = event.finished.usage.cached_tokens
    return answer


def _compare(answer: Answer, oracle: Oracle) -> None:
    tokens = answer.tokens
    reference = oracle.after([token.id for token in tokens])
    assert answer.prompt_tokens == len(reference.prompt_ids)
    assert len(tokens) == NEW_TOKENS
    expected = torch.log_softmax(reference.logits, -1)
    for step, (token, gap) in enumerate(zip(tokens, reference.gaps(), strict=True)):
        best = int(expected[step].argmax())
        assert token.id == best or gap <= TOLERANCE, f"step {step}: not {best}, gap {gap}"
        _compare_logprobs(token, expected[step])


def _compare_logprobs(token: Any, expected: torch.Tensor) -> None:
    """The chosen token's and the largest ones', by id and by rank: near ties may swap."""
    assert abs(token.logprob - float(expected[token.id])) <= TOLERANCE
    assert len({entry.id for entry in token.top}) == TOP
    reported = torch.tensor([entry.logprob for entry in token.top])
    by_id = expected[[entry.id for entry in token.top]]
    assert (reported - by_id).abs().max() <= TOLERANCE
    assert (reported - expected.topk(TOP).values).abs().max() <= TOLERANCE


def _ask_all(cluster: Cluster, together: Sequence[Oracle], alone: Sequence[Oracle]) -> list[Answer]:
    with ThreadPoolExecutor(len(together)) as pool:
        answers = list(pool.map(lambda o: _ask(cluster.grpc_address, o.conversation), together))
    answers += [_ask(cluster.grpc_address, oracle.conversation) for oracle in alone]
    for answer, oracle in zip(answers, [*together, *alone], strict=True):
        _compare(answer, oracle)
    cluster.assert_clean()
    return answers


@pytest.mark.timeout(400)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_pipeline_answers_as_generate_does(
    family: str, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    path = tiny_checkpoint(family)
    together, alone = ([Oracle.of(path, case) for case in cases] for cases in (CONCURRENT, ALONE))
    with service(tmp_path, path, CHUNKS[0]) as cluster:
        _ask_all(cluster, together, alone)
        for chunk in CHUNKS[1:]:
            change_chunk(cluster, chunk)
            _ask_all(cluster, together, alone)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_pipeline_with_every_cache_answers_as_generate_does(
    family: str, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    """Asked three times, each time in another order and company."""
    path = tiny_checkpoint(family)
    asked = [Oracle.of(path, case) for case in (*CONCURRENT, *ALONE)]
    draw = random.Random(family)
    with service(tmp_path, path, 24, caches=True) as cluster:
        for _ in range(3):
            draw.shuffle(asked)
            answers = _ask_all(cluster, asked[:7], asked[7:])
    # The last time everything of more than a block was known, and nothing is all cached.
    known = [answer for answer in answers if answer.prompt_tokens > 16]
    assert known
    assert all(0 < answer.cached_tokens < answer.prompt_tokens for answer in known)


def test_the_reference_follows_another_answer(tiny_checkpoint: TinyCheckpoint) -> None:
    """After a token that the model wouldn't have chosen, its logits are those after it."""
    oracle = Oracle.of(tiny_checkpoint("qwen3_vl"), ALONE[1])
    ids = oracle.greedy.ids
    assert oracle.after(list(ids)) is oracle.greedy
    other = oracle.after([*ids[:4], (ids[4] + 1) % 20, *ids[5:]])
    assert (other.logits[:5] - oracle.greedy.logits[:5]).abs().max() < TOLERANCE
    assert (other.logits[5:] - oracle.greedy.logits[5:]).abs().max() > 100 * TOLERANCE
