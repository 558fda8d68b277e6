"""Logits to tokens: the same code in prefill (first token) and decode.

A row's token depends on that row and its request alone, never on the other rows of
the batch. Order of operations: `SamplerState.adjust`, then logprobs are reported,
then temperature, top-k, top-p, min-p, and the exponential race of `epd.sampling.noise`.

Shapes: N rows, V vocabulary, C candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from epd.errors import EpdError, ErrorKind
from epd.jobs import SampledToken, SamplingParams
from epd.sampling.noise import noise_key, race
from epd.sampling.state import SamplerState

LOGPROB_FLOOR: Final = -9999.0
"""Reported for what can't be sampled: JSON has no -inf."""

GREEDY_BELOW: Final = 1e-5
"""A temperature below this is greedy: dividing by it only overflows."""

_CLASS_SHIFT: Final = 46
"""Of a double: leaves the exponent and six bits of the mantissa."""


class Sampler:
    """Samples rows of `vocab_size` logits."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    @torch.inference_mode()
    def sample(
        self,
        logits_NV: Tensor,
        states: Sequence[SamplerState],
        best: Sequence[int] | None = None,
    ) -> list[SampledToken | EpdError]:
        """The next token of each row's request; the states are not changed. Logits count as
        float32 numbers, whatever they are kept as. `best`: see `epd.models.lm.Decoded`.

        A row that can't be sampled (NaN or infinite logits, or nothing left to choose
        from) gets an EpdError in its place; the other rows are not affected.
        """
        assert logits_NV.shape == (len(states), self.vocab_size)
        if not states:
            return []
        logits_NV = logits_NV.cpu()  # from a device in one copy, not row by row
        known: Sequence[int | None] = [None] * len(states)
        if best is None:
            usable = torch.isfinite(logits_NV.amax(-1)).tolist()  # NaN where any logit is
        else:
            known, usable = best, [token >= 0 for token in best]
        return [
            self._sample_row(logits_NV[row], state, known[row]) if usable[row] else _broken()
            for row, state in enumerate(states)
        ]

    def _sample_row(
        self, logits_V: Tensor, state: SamplerState, best: int | None
    ) -> SampledToken | EpdError:
        """`best`: the greedy token of the logits as they are, where it is known already."""
        params = state.params
        greedy = params.temperature < GREEDY_BELOW
        if state.adjusts or not greedy:
            best = None
        if best is not None and not params.logprobs:
            return SampledToken(best)
        logits_V = logits_V.float()
        if state.adjusts:
            try:
                logits_V = state.adjust(logits_V)
            except EpdError as error:
                return error
            if not bool(torch.isfinite(logits_V.amax())):
                return _nothing_left()
        if best is None:
            best = _best(logits_V) if greedy else draw(logits_V, params, state.num_output)
        return _report(logits_V, best, params)


def _best(logits_V: Tensor) -> int:
    """The lowest of the best ids. numpy's argmax takes a tenth of torch's time on a CPU."""
    return int(logits_V.numpy(force=True).argmax())


def draw(logits_V: Tensor, params: SamplingParams, index: int) -> int:
    """The `index`-th output token by temperature, filters and noise.

    argmax over candidates of p / noise with Exp(1) noise picks id i with probability
    p_i (the exponential race; the same as Gumbel-max on the logarithms).
    """
    ids_C, probabilities_C = candidates(logits_V, params)
    key = noise_key(params.seed, params.choice, index)
    return int(ids_C[race(key, ids_C, probabilities_C)])


def candidates(
    logits_V: Tensor, params: SamplingParams
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Ids that can be drawn, and their probabilities [C] (not normalised).

    The filters mean what transformers' TopK-, TopP- and MinPLogitsWarper mean: top-k
    keeps ties of the k-th; top-p keeps the smallest set of most likely ids whose
    probability reaches top_p; min-p keeps ids at least min_p times as likely as the best.
    """
    scaled_V = ((logits_V - logits_V.max()) / params.temperature).cpu()
    keep_V = torch.isfinite(scaled_V)
    if 0 < params.top_k < len(scaled_V):
        keep_V &= scaled_V >= scaled_V.topk(params.top_k).values[-1]
    ids_C = np.flatnonzero(keep_V.numpy())
    p_C = np.exp(scaled_V.numpy()[ids_C].astype(np.float64))
    if params.top_p < 1.0:
        inside = _top_p(p_C, params.top_p)
        ids_C, p_C = ids_C[inside], p_C[inside]
    if params.min_p > 0.0:
        likely = p_C >= params.min_p * p_C.max()
        ids_C, p_C = ids_C[likely], p_C[likely]
    return ids_C, p_C


def _top_p(p_C: NDArray[np.float64], top_p: float) -> NDArray[np.bool_]:
    """The smallest set of most likely ids that reaches `top_p`, at least one.

    Of equally likely ids the lower ones first. Only the ids around the threshold are
    sorted: they are found by the sums of classes of about the same probability (the
    same leading bits).
    """
    wanted = top_p * p_C.sum()
    class_C = p_C.view(np.int64) >> _CLASS_SHIFT
    class_C -= class_C.min()
    reached = np.bincount(class_C, weights=p_C)[::-1].cumsum()
    above = min(int(np.searchsorted(reached, wanted)), len(reached) - 1)
    threshold = len(reached) - 1 - above
    inside = class_C > threshold
    edge = np.flatnonzero(class_C == threshold)
    edge = edge[np.argsort(-p_C[edge], kind="stable")]
    before = (reached[above - 1] if above else 0.0) + p_C[edge].cumsum() - p_C[edge]
    inside[edge[before < wanted]] = True
    inside[edge[:1]] = True
    return inside


def _report(logits_V: Tensor, chosen: int, params: SamplingParams) -> SampledToken:
    """With logprobs after penalties and bias, before temperature."""
    if not params.logprobs:
        return SampledToken(chosen)
    logprobs_V = logits_V.double().log_softmax(-1).clamp(min=LOGPROB_FLOOR)
    top: tuple[tuple[int, float], ...] = ()
    if params.top_logprobs:
        ids = _most_likely(logprobs_V, min(params.top_logprobs, len(logprobs_V)))
        top = tuple(zip(ids.tolist(), logprobs_V[ids].tolist(), strict=True))
    return SampledToken(chosen, float(logprobs_V[chosen]), top)


def _most_likely(logprobs_V: Tensor, count: int) -> Tensor:
    """Ids, most likely first; of equally likely ones the lower, as everywhere here. topk
    alone takes any of them, and logits of bfloat16 are often equal."""
    least = logprobs_V.topk(count).values[-1]
    above = (logprobs_V > least).nonzero()[:, 0]
    equal = (logprobs_V == least).nonzero()[: count - len(above), 0]
    order = logprobs_V[above].argsort(descending=True, stable=True)
    return torch.cat([above[order], equal])


def _broken() -> EpdError:
    return EpdError(ErrorKind.INTERNAL, "the model's logits are not finite numbers")


def _nothing_left() -> EpdError:
    return EpdError(
        ErrorKind.INVALID_REQUEST,
        "penalties, logit_bias, min_tokens and grammar leave no token to sample",
        param="logit_bias",
    )
