"""With every cache on, in any order: bit for bit what no cache would say.

Exact mode in bfloat16, four real processes. A service without caches says what is right;
one with caches is asked the same in the order and company that hypothesis draws: repeated
prompts, common beginnings, turns of one conversation, pictures behind other words. Under
pressure, with evictions: test_workers_caches.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import TinyCheckpoint
from tests.e2e.cluster import Cluster
from tests.parity.conversations import CONCURRENT, conversation
from tests.parity.service import WHOLE, body, service

NEW_TOKENS = 24
OPTIONS = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
SMALL = {"kv.block_tokens": 8, "kv.prefill_tokens": 512, "kv.decode_tokens": 320}
TURN = "please describe the image, what is this? " * 2


def _cases() -> list[dict[str, Any]]:
    plain = [body(asked) for asked in CONCURRENT]
    shown = [body(conversation(words, None, TURN, seed=9)) for words in ("what", "hello user")]
    opening = body(conversation(TURN, None, "describe", seed=9))
    answered = {"role": "assistant", "content": "hello world this is the image"}
    following = body(conversation("what is this"))["messages"]
    turns = [opening["messages"], [*opening["messages"], answered, *following]]
    turns.append([*turns[-1], answered, *following])
    return [*plain, *shown, *({**opening, "messages": messages} for messages in turns)]


CASES = _cases()
wave = st.lists(
    st.tuples(st.integers(0, len(CASES) - 1), st.integers(1, NEW_TOKENS)), min_size=1, max_size=5
)


def _ask(cluster: Cluster, case: int, tokens: int = NEW_TOKENS) -> tuple[list[str], int, int]:
    """(all that is said of each token, prompt tokens, those that were cached). Equal text
    is equal bits, as JSON has the shortest decimal that gives the same float."""
    asked = CASES[case] | OPTIONS | {"max_tokens": tokens, "model": cluster.model}
    reply = cluster.chat(asked, timeout_s=120)
    assert reply.status == 200, reply
    answer, usage = reply.json["choices"][0], reply.json["usage"]
    said = [json.dumps(entry) for entry in answer["logprobs"]["content"]]
    assert len(said) == tokens
    return said, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture(scope="module")
def right(
    tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory
) -> list[list[str]]:
    """What is said to each case where nothing is cached."""
    path = tiny_checkpoint("qwen3_vl", "bfloat16")
    folder = tmp_path_factory.mktemp("cold")
    with service(folder, path, WHOLE, {"model.exact": True, "kv.block_tokens": 8}) as cold:
        answers = [_ask(cold, case) for case in range(len(CASES))]
        assert all(cached == 0 for _, _, cached in answers)
        cold.assert_clean()
    assert len({"".join(said) for said, _, _ in answers}) == len(answers)
    return [said for said, _, _ in answers]


@pytest.fixture(scope="module")
def cached(
    tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    path = tiny_checkpoint("qwen3_vl", "bfloat16")
    folder = tmp_path_factory.mktemp("cached")
    with service(folder, path, 24, {"model.exact": True, **SMALL}, caches=True) as cluster:
        yield cluster
        for role, cache in (("prefill", "prefill_prefix"), ("decode", "decode_prefix")):
            page = cluster.worker(role).metrics()
            sample = f'epd_cache_lookups_total{{cache="{cache}",outcome="hit"}}'
            assert sample in page, f"the schedules never came to {sample}"


waves = st.lists(wave, min_size=1, max_size=3)
_CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=4, deadline=None, suppress_health_check=_CHECKS)
@given(waves)
def test_any_schedule_says_what_no_cache_would(
    right: list[list[str]], cached: Cluster, waves: list[list[tuple[int, int]]]
) -> None:
    _play(right, cached, waves)


@pytest.mark.long
@settings(max_examples=30, deadline=None, suppress_health_check=_CHECKS)
@given(waves)
def test_any_of_many_schedules_says_what_no_cache_would(
    right: list[list[str]], cached: Cluster, waves: list[list[tuple[int, int]]]
) -> None:
    _play(right, cached, waves)


def _play(right: list[list[str]], cached: Cluster, waves: list[list[tuple[int, int]]]) -> None:
    with ThreadPoolExecutor(5) as pool:
        for together in waves:
            answers = list(pool.map(lambda asked: _ask(cached, *asked), together))
            for (case, tokens), (said, prompt, found) in zip(together, answers, strict=True):
                assert said == right[case][:tokens]
                assert found % 8 == 0
                assert found < prompt
    cached.assert_clean()
