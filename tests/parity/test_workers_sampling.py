"""Prefill and decode workers: everything that decides which token comes, and when the output ends.

Exact mode in bfloat16, where a decode step is one call and steps follow each other in the engine
thread (`epd.models.shortcut`, `epd.runtime.series`). What each request is answered is first
computed by one model in one piece, by the model's own forward and one sampler that is never
rebuilt. Then many at once, of any kind, that come, leave, are pushed out and come again: tokens,
logprobs, alternatives and ends are the same bit by bit.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decode.ticket import Finished, TokenMade
from epd.errors import EpdError, ErrorKind
from epd.jobs import FinishReason, Grammar, GrammarKind, SampledToken, SamplingParams
from epd.models.kernels import build
from epd.models.lm import LanguageModel
from epd.models.shortcut import Shortcut
from epd.sampling.grammar import Grammars
from epd.sampling.sampler import Sampler
from epd.sampling.state import SamplerState
from tests.e2e.cluster import DEMO_CHECKPOINT
from tests.parity.split import Request, Worker
from tests.parity.workers import (
    BLOCK,
    Pair,
    Prompt,
    Visit,
    prompts,
    schedules,
    unless_it_leaves,
)
from tests.unit.fake_stage import decode_job, prefill_job

Answer = tuple[list[SampledToken], FinishReason]
_PROMPTS = 14
_POOLS = {"kv__prefill_tokens": 400, "kv__decode_tokens": 400}


def _json(**properties: Any) -> Grammar:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


_COLOUR = _json(colour={"enum": ["red", "blue"]}, n={"type": "integer", "maximum": 99})
_WORDS = Grammar(GrammarKind.REGEX, "[a-z ]{2,40}[.]")
_TOP = {"logprobs": True, "top_logprobs": 6}
_HOT = {"temperature": 1.2}
_SOME = tuple(range(0, 1000, 7))
OPTIONS: list[dict[str, Any]] = [
    {},
    _TOP,
    {"max_tokens": 1},
    {"max_tokens": 2, **_TOP},
    _HOT,
    {**_HOT, **_TOP},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.8, "min_p": 0.05},
    {"repetition_penalty": 1.4, **_TOP},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {**_HOT, "frequency_penalty": -1.5, "repetition_penalty": 1.1, **_TOP},
    {"logit_bias": {400: 6.0, 401: 6.0, 402: -100.0}, **_TOP},
    {"stop_token_ids": _SOME, **_HOT},
    {"stop_token_ids": _SOME, **_HOT, "min_tokens": 9, **_TOP},
    {"ignore_eos": True, **_TOP},
    {"grammar": _COLOUR, **_TOP},
    {"grammar": _COLOUR, **_HOT},
    {"grammar": _WORDS, **_HOT, "min_tokens": 12, **_TOP},
    {"grammar": _WORDS, "repetition_penalty": 1.3},
]


class Alone:
    """A model in one piece, one request."""

    def __init__(self, path: Path, rows: dict[bytes, torch.Tensor]) -> None:
        self._worker = Worker(path, exact=True, block_tokens=16)
        spec = self._worker.lm.spec
        self._grammars = Grammars(str(path), spec.vocab_size, spec.eos_token_ids)
        self._sampler, self._rows = Sampler(spec.vocab_size), rows

    def answer(self, prompt: Prompt, params: SamplingParams) -> Answer:
        ids, items = prompt
        rows = torch.cat([self._rows[item.digest] for item in items], 1) if items else None
        running = Request(list(ids), list(items), rows, [])
        running.positions, running.delta = self._worker.lm.positions(
            torch.tensor(ids), items, len(ids)
        )
        matcher = self._grammars.build(params.grammar, ()) if params.grammar else None
        state, made = SamplerState(params, ids, matcher=matcher), []
        while True:
            token = self._next(running, state)
            made.append(token)
            if (reason := state.accept(token.id, context_full=False)) is not None:
                self._worker.free(running)
                return made, reason

    def _next(self, running: Request, state: SamplerState) -> SampledToken:
        lacking = len(running.token_ids) - running.computed
        (logits,) = self._worker.step([(running, lacking)])
        (token,) = self._sampler.sample(logits[-1:], [state])
        assert isinstance(token, SampledToken), token
        running.forced_ids.append(token.id)
        row = self._worker.lm.continuation(len(running.token_ids) - 1, 1, running.delta)
        running.positions = torch.cat([running.positions, row], 1)
        return token


class Workers(Pair):
    """Requests with parameters of their own."""

    pushed_out = 0

    async def answer(self, prompt: Prompt, params: SamplingParams) -> Answer:
        """As a gateway does: one that is pushed out comes again with what it has."""
        made: list[SampledToken] = []
        while True:
            try:
                return made, await self._once(prompt, params, made)
            except EpdError as error:
                if error.kind is not ErrorKind.OVERLOADED:
                    raise
                self.pushed_out += 1
            await asyncio.sleep(0.005)

    async def _once(
        self, prompt: Prompt, params: SamplingParams, made: list[SampledToken]
    ) -> FinishReason:
        visit = await self._begin(prompt, params, [token.id for token in made])
        ended = False
        try:
            made.append(await self._prefill(visit))
            while events := await visit.reader.events.take():
                made += [event.token for event in events if isinstance(event, TokenMade)]
                if isinstance(last := events[-1], Finished):
                    ended = True
                    return last.reason
            raise AssertionError("ended without a reason")
        except EpdError:
            ended = True
            raise
        finally:
            await (self._end(visit) if ended else self._leave(visit, True))

    async def _begin(
        self, prompt: Prompt, params: SamplingParams, generated: Sequence[int]
    ) -> Visit:
        ids, items = (*prompt[0], *generated), prompt[1]
        jobs: dict[str, Any] = {"items": items, "prompt": len(prompt[0])}
        ticket = await self.prefill.submit(replace(prefill_job(ids, **jobs), sampling=params))
        job = replace(decode_job(ids, **jobs), sampling=params, position_delta=ticket.delta)
        try:
            reader = await self.decode.submit(job)
        except BaseException:
            self.prefill.close(ticket, clean=True)
            raise
        return Visit(prompt, ticket, reader)


@dataclass
class House:
    lm: LanguageModel
    asked: list[Prompt]
    alone: Alone
    _right: dict[tuple[int, int], Answer] = field(default_factory=dict)

    def params(self, option: int) -> SamplingParams:
        """Each draws from its own noise."""
        eos = self.lm.spec.eos_token_ids
        given = {"max_tokens": 26, "seed": 77 + option, "eos_token_ids": eos}
        return SamplingParams(**{**given, **OPTIONS[option]})

    def right(self, case: int, option: int) -> Answer:
        if (case, option) not in self._right:
            answer = self.alone.answer(self.asked[case], self.params(option))
            self._right[case, option] = answer
        return self._right[case, option]


@pytest.fixture(scope="module")
def house() -> House:
    path = Path(DEMO_CHECKPOINT)
    lm = LanguageModel.load(path, exact=True, block_tokens=BLOCK)
    assert lm._shortcut is not None or build.load() is None
    asked = prompts(lm.spec.image_token_id)
    assert len(asked) >= _PROMPTS
    return House(lm, asked, Alone(path, Pair(lm, **_POOLS).rows))


@dataclass(frozen=True)
class Guest:
    case: int
    option: int
    comes_ms: int = 0
    leaves_ms: int | None = None


async def play(house: House, waves: list[list[Guest]], **drawn: Any) -> Workers:
    workers = Workers(house.lm, **drawn)
    workers.start()
    async with asyncio.timeout(200):
        for wave in waves:
            answers = await asyncio.gather(*(_visit(workers, house, guest) for guest in wave))
            for guest, answer in zip(wave, answers, strict=True):
                if answer is not None:
                    assert answer == house.right(guest.case, guest.option), guest
            await workers.pass_time()
        await workers.shut_down()
    return workers


async def _visit(workers: Workers, house: House, guest: Guest) -> Answer | None:
    await asyncio.sleep(guest.comes_ms / 1e3)
    params = house.params(guest.option)
    asking = workers.answer(house.asked[guest.case], params)
    return await unless_it_leaves(asking, guest.leaves_ms)


async def test_every_option_at_once_in_pools_that_are_too_small(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    original = Shortcut.__call__

    def count(self: Shortcut, rows: Any, *args: Any) -> Any:
        steps.append(len(rows))
        return original(self, rows, *args)

    monkeypatch.setattr(Shortcut, "__call__", count)
    chance = random.Random(4)
    waves = [
        [Guest(chance.randrange(_PROMPTS), option, chance.randrange(30)) for option in order]
        for order in (range(len(OPTIONS)), reversed(range(len(OPTIONS))))
    ]
    small = {"kv__prefill_tokens": 160, "kv__decode_tokens": 160, "prefill__chunk_tokens": 11}
    workers = await play(house, waves, **small)
    assert workers.pushed_out
    assert workers.cached
    assert max(steps, default=2) > 1
    assert steps or build.load() is None
    reasons = {house.right(guest.case, guest.option)[1] for wave in waves for guest in wave}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


guests = st.builds(
    Guest,
    case=st.integers(0, _PROMPTS - 1),
    option=st.integers(0, len(OPTIONS) - 1),
    comes_ms=st.sampled_from([0, 0, 1, 3, 8, 20]),
    leaves_ms=st.one_of(st.none(), st.none(), st.none(), st.sampled_from([0, 2, 5, 12, 30, 80])),
)
houses = st.fixed_dictionaries(
    {
        "prefill__chunk_tokens": st.sampled_from([3, 11, 64]),
        "kv__prefill_tokens": st.sampled_from([96, 160, 400]),
        "kv__decode_tokens": st.sampled_from([120, 200, 400]),
        "decode__max_running": st.sampled_from([2, 5, 16]),
        "decode__prefix_cache": st.booleans(),
    }
)


@schedules(8)
@given(houses, st.lists(st.lists(guests, min_size=1, max_size=8), min_size=1, max_size=3))
def test_no_company_changes_an_answer(
    house: House, drawn: dict[str, Any], waves: list[list[Guest]]
) -> None:
    asyncio.run(play(house, waves, **drawn))


@pytest.mark.long
@pytest.mark.timeout(900)
@schedules(150)
@given(houses, st.lists(st.lists(guests, min_size=1, max_size=8), min_size=1, max_size=3))
def test_no_company_of_many_changes_an_answer(
    house: House, drawn: dict[str, Any], waves: list[list[Guest]]
) -> None:
    asyncio.run(play(house, waves, **drawn))
