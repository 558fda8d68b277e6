"""What a request's next token depends on beside the model: its parameters and past."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from epd.jobs import FinishReason, SamplingParams
from epd.sampling.grammar import Matcher
from epd.sampling.params import finish_reason


class SamplerState:
    """Rebuilt by replay wherever a request goes on: no hidden state.

    `output_ids` are the tokens generated so far, on whatever worker; they stay output
    when they are prefilled again after a failover.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Iterable[int] = (),
        matcher: Matcher | None = None,
    ) -> None:
        """`matcher` of the parameters' grammar stands after `output_ids` already."""
        assert (params.grammar is None) == (matcher is None)
        self.params = params
        self._matcher: Matcher | None = None
        self.num_output = 0
        self._counts: Counter[int] = Counter()
        self._seen: set[int] = set(prompt_ids) if params.repetition_penalty != 1.0 else set()
        for token in output_ids:
            self.append(token)
        self._matcher = matcher

    def append(self, token_id: int) -> None:
        """The token was accepted as the next of the output."""
        self.num_output += 1
        self._counts[token_id] += 1
        if self.params.repetition_penalty != 1.0:
            self._seen.add(token_id)
        if self._matcher is not None:
            self._matcher.advance(token_id)

    def accept(self, token_id: int, *, context_full: bool) -> FinishReason | None:
        """`append`, and whether the output ends with this token: by the parameters, or
        since its grammar is complete."""
        self.append(token_id)
        if self._matcher is not None and self._matcher.complete:
            return FinishReason.STOP
        return finish_reason(self.params, token_id, self.num_output, context_full=context_full)

    @property
    def suppresses_end(self) -> bool:
        """Stop ids can't be sampled yet."""
        return self.num_output < self.params.min_tokens and bool(self.params.ending_ids)

    @property
    def _suppressed(self) -> frozenset[int]:
        early = self.params.ending_ids if self.suppresses_end else frozenset[int]()
        # The model's own end has no text, so a grammar that goes on has no place for it.
        return early | frozenset(self.params.eos_token_ids if self.params.ignore_eos else ())

    @property
    def adjusts(self) -> bool:
        """Whether `adjust` changes anything."""
        p = self.params
        return bool(
            p.repetition_penalty != 1.0
            or ((p.presence_penalty or p.frequency_penalty) and self._counts)
            or p.logit_bias
            or self.suppresses_end
            or self._matcher is not None
        )

    def adjust(self, logits_V: Tensor) -> Tensor:
        """A new row with penalties and bias, in this order (see docs/numerics.md):

        repetition penalty (ids of prompt and output), presence and frequency penalty
        (ids of the output), logit bias, then -inf for stop ids before `min_tokens` and for
        what is outside the grammar. A grammar that only the end can follow wins over
        `min_tokens` and `ignore_eos`.

        Raises:
            EpdError: the grammar can't go on.
        """
        row_V = logits_V.clone()
        self._penalise_repetition(row_V)
        self._penalise_output(row_V)
        for token, bias in self.params.logit_bias.items():
            row_V[token] += bias
        if self._matcher is not None:
            allowed = self._matcher.allowed(self._suppressed)
            row_V[torch.from_numpy(~allowed).to(row_V.device)] = float("-inf")
        elif self.suppresses_end:
            ending = [token for token in self.params.ending_ids if token < len(row_V)]
            row_V[ending] = float("-inf")
        return row_V

    def _penalise_repetition(self, row_V: Tensor) -> None:
        """Keskar et al. 2019 (CTRL), as transformers: divide if positive, else multiply."""
        penalty = self.params.repetition_penalty
        if penalty == 1.0 or not self._seen:
            return
        ids = torch.tensor([i for i in self._seen if i < len(row_V)], device=row_V.device)
        scores = row_V[ids]
        row_V[ids] = torch.where(scores < 0, scores * penalty, scores / penalty)

    def _penalise_output(self, row_V: Tensor) -> None:
        presence, frequency = self.params.presence_penalty, self.params.frequency_penalty
        if not (presence or frequency) or not self._counts:
            return
        ids = torch.tensor(list(self._counts), device=row_V.device)
        counts = torch.tensor(list(self._counts.values()), device=row_V.device)
        row_V[ids] -= presence + frequency * counts.to(row_V.dtype)
