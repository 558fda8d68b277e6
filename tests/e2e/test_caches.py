"""Caches of prefill and decode, in real processes: what is found, what moves, what is said.

In exact mode, so that a cached answer can be compared bit by bit with a cold one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import OpenAI

from tests.e2e.cluster import Cluster
from tests.e2e.conftest import COLOUR, MakeCluster, another_picture, picture, user

BLOCK = 8
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def exact(make_cluster: MakeCluster) -> Cluster:
    return make_cluster(settings={"model.exact": True, "kv.block_tokens": BLOCK})


@pytest.fixture
def cluster(exact: Cluster) -> Iterator[Cluster]:
    exact.make_whole()
    yield exact
    exact.assert_clean()


def ask(cluster: Cluster, *messages: dict[str, Any], **options: Any) -> dict[str, Any]:
    body = {"messages": list(messages), "temperature": 0, "max_tokens": 12, "logprobs": True}
    reply = cluster.chat(body | {"top_logprobs": 5, "timeline": True} | options)
    assert reply.status == 200, reply.body
    answer: dict[str, Any] = reply.json
    return answer


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def said(answer: dict[str, Any]) -> Any:
    """Text, ids' bytes and every logprob: all that a client sees of the output."""
    return [(choice["message"], choice["logprobs"]) for choice in answer["choices"]]


def most(answer: dict[str, Any]) -> int:
    """Tokens that a repeated prompt finds: all full blocks, but never the last token."""
    return (int(answer["usage"]["prompt_tokens"]) - 1) // BLOCK * BLOCK


def count(cluster: Cluster, role: str, name: str, **labels: str) -> float:
    """Sum of a metric's samples that have these labels."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        float(line.split()[-1])
        for line in cluster.worker(role).metrics().splitlines()
        if line.startswith(name) and all(label in line for label in wanted)
    )


def moved(answer: dict[str, Any], kind: str) -> int:
    """Bytes of this request that went through Mooncake."""
    phases = answer["timeline"]["phases"]
    return sum(phase["bytes"] for phase in phases if phase["name"].startswith(f"{kind} transfer"))


def blocks_read(cluster: Cluster, answer: dict[str, Any]) -> float:
    return moved(answer, "kv") / int(cluster.worker("decode").debug_state()["kv_block_bytes"])


def blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)


def prompt_tokens(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens"])


LONG = "Describe this, and say more about it than you would if you had been asked plainly. "


@pytest.mark.parametrize("with_picture", [False, True], ids=["text", "image"])
def test_a_warm_answer_is_the_cold_one_bit_for_bit(cluster: Cluster, with_picture: bool) -> None:
    parts = (
        [another_picture(), LONG + COLOUR] if with_picture else [f"{next(_numbers)}. {LONG * 3}"]
    )
    encoded = cluster.worker("encode").debug_state()["steps"]
    hits = count(
        cluster, "prefill", "epd_cache_lookups_total", cache="prefill_prefix", outcome="hit"
    )
    cold = ask(cluster, user(*parts))
    warm = [ask(cluster, user(*parts)) for _ in range(2)]
    assert cached(cold) < 3 * BLOCK < most(cold), "no more than the template's start"
    assert [cached(answer) for answer in warm] == [most(cold)] * 2
    assert said(warm[0]) == said(warm[1]) == said(cold)
    found = count(
        cluster, "prefill", "epd_cache_lookups_total", cache="prefill_prefix", outcome="hit"
    )
    assert found - hits == (cached(cold) + 2 * most(cold)) / BLOCK
    assert cluster.worker("encode").debug_state()["steps"] - encoded == int(with_picture)
    # Decode reads what it lacks: the last block, if it isn't full.
    assert [blocks_read(cluster, answer) for answer in warm] == [
        blocks(prompt_tokens(cold)) - prompt_tokens(cold) // BLOCK
    ] * 2


def test_unrelated_traffic_before_changes_nothing(cluster: Cluster) -> None:
    cold = ask(cluster, user(picture("two_stars.png"), "Describe the image."))
    for number in range(3):
        ask(cluster, user(f"Something else, number {number}."), seed=number, temperature=1)
    again = ask(cluster, user(picture("two_stars.png"), "Describe the image."))
    assert cached(again) == most(cold)
    assert said(again) == said(cold)


def test_the_same_prompt_with_another_picture_of_that_size_never_hits(cluster: Cluster) -> None:
    """Behind the same text, with placeholders that have the same ids."""
    first, second = another_picture(), another_picture()
    ask(cluster, user(LONG, first, LONG + COLOUR))
    other = ask(cluster, user(LONG, second, LONG + COLOUR))
    again = ask(cluster, user(LONG, second, LONG + COLOUR))
    text_alone = prompt_tokens(ask(cluster, user(LONG)))
    assert 0 < cached(other) <= text_alone
    assert cached(again) == most(again) > text_alone
    assert said(again) == said(other)
    assert moved(other, "embedding") > 0
    assert moved(again, "embedding") == 0


def test_a_picture_seen_before_is_not_encoded_again_behind_other_words(cluster: Cluster) -> None:
    """No common prefix: the rows are in landing memory. A dead encoder would not matter."""
    shown = another_picture()
    first = ask(cluster, user("First, ", shown, "what is this?"))
    cluster.assert_clean()  # its stream to encode has ended, and is counted
    encode = cluster.worker("encode").debug_state()["steps"]
    streams = count(cluster, "encode", "epd_requests_total")
    hits = count(cluster, "prefill", "epd_cache_lookups_total", cache="landing", outcome="hit")
    second = ask(cluster, user("But now: ", shown, "and what is this?"))
    assert moved(first, "embedding") > 0
    assert moved(second, "embedding") == 0
    assert cluster.worker("encode").debug_state()["steps"] == encode
    assert count(cluster, "encode", "epd_requests_total") == streams, "encode was not called"
    found = count(cluster, "prefill", "epd_cache_lookups_total", cache="landing", outcome="hit")
    assert found - hits == 1
    assert said(ask(cluster, user("But now: ", shown, "and what is this?"))) == said(second)


def test_one_picture_in_many_requests_at_once_is_read_once(cluster: Cluster) -> None:
    shown = another_picture()
    with ThreadPoolExecutor(6) as pool:
        questions = [user(f"Question {number}: ", shown, "?") for number in range(6)]
        answers = list(pool.map(lambda question: ask(cluster, question), questions))
    sizes = [moved(answer, "embedding") for answer in answers]
    assert len([size for size in sizes if size]) == 1, sizes
    alone = [ask(cluster, question) for question in questions]
    assert [said(answer) for answer in alone] == [said(answer) for answer in answers]


def test_swapped_and_repeated_pictures_share_only_the_common_start(cluster: Cluster) -> None:
    a, b = another_picture(), another_picture()
    rows = prompt_tokens(ask(cluster, user(a, "x"))) - prompt_tokens(ask(cluster, user("x")))
    ab = ask(cluster, user(a, b, "Which?"))
    assert rows > 0
    for other in (user(b, a, "Which?"), user(a, a, "Which?"), user("y", a, b, "Which?")):
        answer = ask(cluster, other)
        assert cached(answer) <= (
            cached(ab) if other["content"][0] != user(a)["content"][0] else most(ab) - rows + BLOCK
        )
        assert said(ask(cluster, other)) == said(answer)


def test_the_next_turn_moves_only_what_is_new(cluster: Cluster) -> None:
    """Decode has the last turn's prompt and answer; prefill the prompt."""
    opening = user(LONG * 2, another_picture(), "Describe the image.")
    first = ask(cluster, opening, max_tokens=24)
    before = count(cluster, "decode", "epd_transfer_bytes_total", kind="kv")
    encoded = cluster.worker("encode").debug_state()["steps"]
    reply = first["choices"][0]["message"]["content"]
    second = ask(cluster, opening, {"role": "assistant", "content": reply}, user("Why?"))
    size = int(cluster.worker("decode").debug_state()["kv_block_bytes"])
    read = count(cluster, "decode", "epd_transfer_bytes_total", kind="kv") - before
    assert read == moved(second, "kv")
    assert read / size <= blocks(prompt_tokens(second)) - prompt_tokens(first) // BLOCK
    assert cached(second) == prompt_tokens(first) // BLOCK * BLOCK
    assert cluster.worker("encode").debug_state()["steps"] == encoded


def test_several_answers_to_one_prompt_share_its_blocks(cluster: Cluster) -> None:
    together = ask(cluster, user(LONG + "Say it thrice."), n=3, temperature=1, seed=5)
    again = ask(cluster, user(LONG + "Say it thrice."), n=3, temperature=1, seed=5)
    assert said(again) == said(together)
    assert cached(again) == most(again)


def test_cached_blocks_are_counted_apart_from_used_ones(cluster: Cluster) -> None:
    ask(cluster, user(LONG))
    cluster.assert_clean()
    for role in ("prefill", "decode"):
        state = cluster.worker(role).debug_state()
        assert state["kv_blocks_cached"] > 0
        assert state["kv_blocks_pinned"] == state["kv_blocks_used"] == 0
    ask(cluster, user(another_picture(), "?"))
    cluster.assert_clean()
    state = cluster.worker("prefill").debug_state()
    assert state["embeddings_cached"] > 0
    assert state["arena_bytes_cached"] > 0
    assert state["embeddings_pinned"] == state["arena_bytes_used"] == 0


def test_two_tenants_never_share(make_cluster: MakeCluster) -> None:
    """The same words and the same picture, each twice, by two keys."""
    house = make_cluster(settings={"kv.block_tokens": BLOCK, "gateway.api_keys": "one,two"})
    messages: Any = [user(LONG, another_picture(), LONG + COLOUR)]
    found = []
    for key in ("one", "two", "one", "two"):
        client = OpenAI(base_url=house.base_url, api_key=key, max_retries=0)
        model = client.models.list().data[0].id
        steps = house.worker("encode").debug_state()["steps"]
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=2)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        encoded = house.worker("encode").debug_state()["steps"] - steps
        found.append((answer.usage.prompt_tokens_details.cached_tokens, encoded))
    assert answer.usage is not None
    warm = (answer.usage.prompt_tokens - 1) // BLOCK * BLOCK
    assert found == [(0, 1), (0, 1), (warm, 0), (warm, 0)]
    house.assert_clean()


@pytest.mark.long
def test_switched_off_nothing_is_found_and_the_answers_are_the_same(
    cluster: Cluster, make_cluster: MakeCluster
) -> None:
    off = make_cluster(
        settings={
            "model.exact": True,
            "kv.block_tokens": BLOCK,
            "prefill.prefix_cache": False,
            "decode.prefix_cache": False,
            "prefill.embedding_cache": False,
            "encode.cache_mib": 0,
        }
    )
    question = user(LONG, another_picture(), LONG + COLOUR)
    on = [ask(cluster, question) for _ in range(2)]
    without = [ask(off, question) for _ in range(2)]
    assert [cached(answer) for answer in without] == [0, 0]
    assert cached(on[1]) > 0
    assert moved(without[1], "embedding") > 0
    assert blocks_read(off, without[1]) == blocks(prompt_tokens(without[1]))
    assert said(on[0]) == said(on[1]) == said(without[0]) == said(without[1])
    off.assert_clean()
