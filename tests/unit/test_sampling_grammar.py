"""Constrained decoding: masks, completion, replay; refusals that say why."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from epd.errors import EpdError, ErrorKind
from epd.jobs import FinishReason, Grammar, GrammarKind, SampledToken, SamplingParams
from epd.sampling.grammar import MAX_GRAMMAR_BYTES, Grammars
from epd.sampling.sampler import LOGPROB_FLOOR, Sampler
from epd.sampling.state import SamplerState

CHECKPOINT = Path(__file__).parents[2] / "demo" / "checkpoint"
VOCAB, EOS = 1100, (1019, 1017)
TOKENIZER = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "n": {"type": "integer", "maximum": 99}},
    "required": ["colour", "n"],
    "additionalProperties": False,
}


def id_of(name: str) -> int:
    found = TOKENIZER.token_to_id(name)
    assert found is not None, name
    return found


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(str(CHECKPOINT), VOCAB, EOS)


def json_schema(schema: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def noisy_logits(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(1, VOCAB, generator=generator) * 5


def generate(
    grammars: Grammars, params: SamplingParams, output: list[int], most: int = 200
) -> tuple[list[SampledToken], FinishReason | None]:
    """Go on from `output` with logits that are noise of the step's number."""
    assert params.grammar is not None
    state = SamplerState(params, (), output, grammars.build(params.grammar, output))
    made: list[SampledToken] = []
    for step in range(len(output), most):
        token = Sampler(VOCAB).sample(noisy_logits(step), [state])[0]
        assert isinstance(token, SampledToken), token
        made.append(token)
        reason = state.accept(token.id, context_full=False)
        if reason is not None:
            return made, reason
    return made, None


def text_of(tokens: list[SampledToken]) -> str:
    text: str = TOKENIZER.decode([token.id for token in tokens], skip_special_tokens=True)
    return text


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.7])
@pytest.mark.parametrize("seed", range(4))
def test_noise_becomes_json_of_the_schema(
    grammars: Grammars, temperature: float, seed: int
) -> None:
    params = SamplingParams(
        temperature=temperature, seed=seed, max_tokens=400, grammar=json_schema(SCHEMA),
        eos_token_ids=EOS,
    )  # fmt: skip
    tokens, reason = generate(grammars, params, [])
    value = json.loads(text_of(tokens))
    assert value["colour"] in ("red", "blue")
    assert value["n"] <= 99
    assert reason is FinishReason.STOP


def test_a_complete_grammar_ends_the_output_without_another_token(grammars: Grammars) -> None:
    params = SamplingParams(max_tokens=99, grammar=regex("(yes|no)!"), eos_token_ids=EOS)
    tokens, reason = generate(grammars, params, [])
    assert text_of(tokens) in ("yes!", "no!")
    assert tokens[-1].id not in EOS
    assert reason is FinishReason.STOP


def test_replay_goes_on_exactly_where_it_was(grammars: Grammars) -> None:
    params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=400, grammar=json_schema(SCHEMA), eos_token_ids=EOS
    )
    whole, _ = generate(grammars, params, [])
    ids = [token.id for token in whole]
    for cut in range(len(ids)):
        rest, reason = generate(grammars, params, ids[:cut])
        assert [token.id for token in rest] == ids[cut:]
        assert reason is FinishReason.STOP


def test_the_end_comes_only_where_the_grammar_is_whole(grammars: Grammars) -> None:
    matcher = grammars.build(regex("[a-z]{3,}"), ())
    for letter in "abc":
        assert not matcher.allowed()[list(EOS)].any()
        matcher.advance(id_of(letter))
    assert matcher.allowed()[list(EOS)].all()
    assert not matcher.complete, "more letters may follow"
    assert not matcher.allowed(EOS)[list(EOS)].any(), "min_tokens suppresses the end"


def test_a_grammar_that_only_the_end_can_follow_wins_over_min_tokens(grammars: Grammars) -> None:
    matcher = grammars.build(regex("ab"), [id_of(letter) for letter in "ab"])
    assert matcher.complete
    assert set(matcher.allowed(EOS).nonzero()[0].tolist()) == set(EOS)


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_min_tokens_and_ignore_eos_hold_while_the_grammar_goes_on(
    grammars: Grammars, ignore_eos: bool
) -> None:
    params = SamplingParams(
        max_tokens=30, min_tokens=20, ignore_eos=ignore_eos, grammar=regex("[a-z ]*"),
        eos_token_ids=EOS, logit_bias={EOS[0]: 100.0},
    )  # fmt: skip
    tokens, reason = generate(grammars, params, [])
    assert len(tokens) == (30 if ignore_eos else 21)
    assert reason is (FinishReason.LENGTH if ignore_eos else FinishReason.STOP)


def test_a_clients_stop_id_ends_what_the_grammar_allows(grammars: Grammars) -> None:
    stop = id_of("a")
    params = SamplingParams(
        max_tokens=30, grammar=regex("[ab]*"), stop_token_ids=(stop,), logit_bias={stop: 100.0}
    )
    tokens, reason = generate(grammars, params, [])
    assert [token.id for token in tokens] == [stop]
    assert reason is FinishReason.STOP


def test_logprobs_of_what_is_masked_have_the_floor(grammars: Grammars) -> None:
    params = SamplingParams(
        max_tokens=9, logprobs=True, top_logprobs=3, grammar=regex("[ab]"), eos_token_ids=EOS
    )
    tokens, _ = generate(grammars, params, [])
    values = [logprob for _, logprob in tokens[0].top]
    assert sum(torch.tensor(values[:2]).exp().tolist()) == pytest.approx(1.0)
    assert values[2] == LOGPROB_FLOOR


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (regex("(("), "unclosed group"),
        (json_schema({"type": "nonsense"}), "nonsense"),
        (json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (Grammar(GrammarKind.JSON_SCHEMA, "{"), "EOF"),
        (Grammar(GrammarKind.LARK, "begin: x"), "start"),
        (regex("a" * (MAX_GRAMMAR_BYTES + 1)), str(MAX_GRAMMAR_BYTES)),
    ],
)
def test_a_grammar_that_cant_be_used_says_why(
    grammars: Grammars, grammar: Grammar, why: str
) -> None:
    with pytest.raises(EpdError, match=why) as caught:
        grammars.build(grammar, ())
    assert caught.value.kind is ErrorKind.INVALID_REQUEST


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("((", "'((': unclosed group"),
        ("a/b{3,1}", "'a/b{3,1}': invalid repetition count range, the start must be <= the end"),
        ("a\n1 | b[", r"'a\n1 | b[': unclosed character class"),
        (r"\b/ error: x", r"'\\b/ error: x': lookarounds not supported yet; WordUnicode"),
        ("x" * 1000 + "(", f"'{'x' * 147}...{'x' * 49}(': unclosed group"),
    ],
)
def test_a_refused_expression_is_shown_as_it_was_written(
    grammars: Grammars, text: str, said: str
) -> None:
    """Not the grammar that was made of it."""
    with pytest.raises(EpdError) as caught:
        grammars.build(regex(text), ())
    assert caught.value.message == f"grammar: {said}"


async def test_compiling_leaves_the_event_loop_alone(grammars: Grammars) -> None:
    assert await grammars.compile(None, ()) is None
    work = asyncio.create_task(grammars.compile(json_schema(SCHEMA), ()))
    await asyncio.sleep(0)
    assert not work.done()
    assert await work is not None


async def test_a_checkpoint_without_a_tokenizer_refuses(tmp_path: Path) -> None:
    with pytest.raises(EpdError, match=r"tokenizer\.json"):
        await Grammars(str(tmp_path), VOCAB, EOS).compile(regex("a"), ())
