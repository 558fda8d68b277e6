"""The whole engine in one process: one model, one pool, no RPC, no hand-off, one request.

What the split service must equal: the prompt in one forward, then token by token, sampled
by the same sampler from a state that is never rebuilt, and turned into text as it comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from epd.config import LimitsConfig
from epd.errors import EpdError
from epd.jobs import FinishReason, SamplingParams
from epd.sampling.grammar import Grammars
from epd.sampling.sampler import Sampler
from epd.sampling.state import SamplerState
from epd.text.messages import ImageSize
from epd.text.output import OutputText, Piece, TextToken
from epd.text.prompt import PromptBuilder
from epd.text.vocabulary import Vocabulary
from gateway.grpc_request import chat_call
from gateway.schema import ChatCall
from protos.epd.v1 import gateway_pb2 as pb
from tests.parity.split import Encoding, Request, Worker


@dataclass
class Output:
    """One choice."""

    text: str
    tokens: list[TextToken]
    """Of the text: without what ended it."""
    sampled: int
    reason: FinishReason


class Joined:
    """A checkpoint in one piece."""

    def __init__(self, path: Path, *, dtype: str, exact: bool) -> None:
        self._encoding = Encoding(path, dtype, exact=exact)
        self._prompts = PromptBuilder.of(self._encoding.processor)
        self._worker = Worker(path, dtype=dtype, exact=exact)
        self._spec = self._worker.lm.spec
        self._sampler = Sampler(self._spec.vocab_size)
        eos = self._spec.eos_token_ids
        self._grammars = Grammars(str(path), self._spec.vocab_size, eos)

    def answer(self, request: pb.ChatRequest, images: Sequence[Image.Image]) -> list[Output]:
        """All choices, one after the other."""
        call = chat_call(request, LimitsConfig(), self._spec.vocab_size)
        return [self._output(call, images, choice) for choice in range(call.generation.choices)]

    def _output(self, call: ChatCall, images: Sequence[Image.Image], choice: int) -> Output:
        asked = call.generation
        assert asked.max_tokens is not None
        assert asked.seed is not None
        params = replace(
            asked.sampling,
            max_tokens=asked.max_tokens,
            seed=asked.seed,
            choice=choice,
            eos_token_ids=self._spec.eos_token_ids,
        )
        running = self._begin(call, images)
        tokenizer = self._encoding.processor.tokenizer.backend_tokenizer
        text = OutputText(tokenizer, Vocabulary(tokenizer), asked.stop, params.ending_ids)
        pieces: list[Piece] = []
        reason = None
        state = self._state(params, running)
        while reason is None:
            token = self._next(running, state)
            if (piece := text.push(token)) is not None:
                pieces.append(piece)
            reason = state.accept(token.id, context_full=False)
            reason = FinishReason.STOP if text.stopped else reason
        if (piece := text.finish()) is not None:
            pieces.append(piece)
        self._worker.free(running)
        tokens = [token for piece in pieces for token in piece.tokens]
        return Output("".join(piece.text for piece in pieces), tokens, text.sampled, reason)

    def _state(self, params: SamplingParams, running: Request) -> SamplerState:
        matcher = self._grammars.build(params.grammar, ()) if params.grammar else None
        return SamplerState(params, running.prompt_ids, matcher=matcher)

    def _next(self, running: Request, state: SamplerState) -> Any:
        lacking = len(running.token_ids) - running.computed
        ((logits),) = self._worker.step([(running, lacking)])
        (token,) = self._sampler.sample(logits[-1:], [state])
        assert not isinstance(token, EpdError), token
        running.forced_ids.append(token.id)
        at = len(running.token_ids) - 1
        row = self._worker.lm.continuation(at, 1, running.delta)
        running.positions = torch.cat([running.positions, row], 1)
        return token

    def _begin(self, call: ChatCall, images: Sequence[Image.Image]) -> Request:
        sizes = [ImageSize(*image.size) for image in images]
        plan = self._prompts.build(call.conversation.messages, sizes)
        return self._encoding.request(self._worker.lm, list(plan.token_ids), images, [])
