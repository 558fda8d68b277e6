"""Right answers, whatever the way of asking."""

from __future__ import annotations

import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import OpenAI

from epd.models.spec import read_spec
from epd.models.weights import read_header, weight_files
from tests.e2e.cluster import DEMO_CHECKPOINT, ROOT, STAGES, Cluster
from tests.e2e.conftest import (
    COLOUR,
    PICTURES,
    another_picture,
    answer,
    demo_questions,
    picture,
    user,
)
from tests.e2e.member import request

BYTES = {"float32": 4, "bfloat16": 2}


@pytest.mark.parametrize("known", demo_questions(), ids=lambda known: known["question"])
def test_the_model_answers_about_its_pictures(client: OpenAI, known: dict[str, Any]) -> None:
    pictures = [picture(name) for name in known["pictures"]]
    assert answer(client, *pictures, known["question"]) == known["answer"]


def test_the_picture_decides_the_answer(client: OpenAI) -> None:
    red = answer(client, picture("red_circle.png"), COLOUR)
    blue = answer(client, picture("blue_circle.png"), COLOUR)
    assert "red" in red
    assert "blue" in blue
    # Again, now that caches hold both: same-sized pictures never share state.
    assert answer(client, picture("red_circle.png"), COLOUR) == red
    assert answer(client, picture("blue_circle.png"), COLOUR) == blue


@pytest.mark.parametrize(("name", "word"), [("red_circle.png", "red"), ("blue_circle.png", "blue")])
def test_epd_chat_asks_about_a_picture(cluster: Cluster, name: str, word: str) -> None:
    """The command as a person types it, in a process of its own."""
    command = [sys.executable, "-m", "epd.cli", "chat", "--url", cluster.base_url]
    command += ["--image", str(PICTURES / name), COLOUR]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"The circle is {word}."


def test_two_pictures_stay_in_order(client: OpenAI) -> None:
    question = "Which image has more shapes?"
    few, many = picture("red_circle.png"), picture("two_stars.png")
    assert "second" in answer(client, few, many, question)
    assert "first" in answer(client, many, few, question)


def test_text_alone_never_touches_encode(cluster: Cluster, client: OpenAI) -> None:
    before = cluster.worker("encode").debug_state()["steps"]
    assert answer(client, "What can you do?", max_tokens=8)
    assert cluster.worker("encode").debug_state()["steps"] == before


def test_one_token_never_touches_decode(cluster: Cluster, client: OpenAI) -> None:
    before = cluster.worker("decode").debug_state()["steps"]
    assert answer(client, picture("red_circle.png"), COLOUR, max_tokens=1)
    assert cluster.worker("decode").debug_state()["steps"] == before


def test_each_process_holds_the_weights_of_its_part_only(cluster: Cluster) -> None:
    """Bytes of the model's parameters in each process, against the checkpoint's files."""
    size = BYTES[read_spec(str(DEMO_CHECKPOINT)).dtype]
    stored = {"vision": 0, "lm": 0}
    for file in weight_files(DEMO_CHECKPOINT):
        for name, tensor in read_header(file).items():
            part = "vision" if name.startswith("model.visual.") else "lm"
            stored[part] += math.prod(tensor["shape"]) * size
    assert min(stored.values()) > 0
    held = {stage: cluster.worker(stage).debug_state()["weights_bytes"] for stage in STAGES}
    assert held == {"encode": stored["vision"], "prefill": stored["lm"], "decode": stored["lm"]}


def test_streaming_gives_the_same_text_in_pieces(cluster: Cluster, client: OpenAI) -> None:
    whole = answer(client, picture("three_shapes.png"), "Describe the image.")
    completions: Any = client.chat.completions
    stream = completions.create(
        model=cluster.model,
        messages=[user(picture("three_shapes.png"), "Describe the image.")],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(pieces) == whole
    assert len([piece for piece in pieces if piece]) > 1
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert [reason for reason in reasons if reason] == ["stop"]
    (usage,) = [chunk.usage for chunk in chunks if chunk.usage]
    assert usage.prompt_tokens > 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_seed_repeats_and_another_differs(client: OpenAI) -> None:
    def sample(seed: int) -> str:
        options: dict[str, Any] = {"temperature": 2.0, "max_tokens": 24, "seed": seed}
        return answer(client, picture("three_shapes.png"), "Describe the image.", **options)

    first = sample(7)
    assert sample(7) == first
    assert any(sample(seed) != first for seed in (8, 9, 10))


def test_max_tokens_is_the_limit(client: OpenAI, cluster: Cluster) -> None:
    body = {"messages": [user(picture("red_circle.png"), "Describe the image.")], "max_tokens": 3}
    reply = cluster.chat(body).json
    assert reply["usage"]["completion_tokens"] == 3
    assert reply["choices"][0]["finish_reason"] == "length"


def test_a_conversation_of_several_turns(client: OpenAI, cluster: Cluster) -> None:
    completions: Any = client.chat.completions
    reply = completions.create(
        model=cluster.model,
        temperature=0,
        messages=[
            user(picture("red_circle.png"), COLOUR),
            {"role": "assistant", "content": "The circle is red."},
            user("Describe the image."),
        ],
    )
    assert "red circle" in reply.choices[0].message.content


def test_eight_at_once_are_as_if_alone(client: OpenAI) -> None:
    asked = [
        (name, q)
        for name in ("red_circle.png", "blue_circle.png", "three_shapes.png", "two_stars.png")
        for q in ("Describe the image.", "How many shapes are there?")
    ]
    alone = [answer(client, picture(name), question) for name, question in asked]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda pair: answer(client, picture(pair[0]), pair[1]), asked))
    assert together == alone
    assert len(set(alone)) > 4


def test_models_and_health(cluster: Cluster, client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.object == "model"
    assert request(cluster.address, "/health").status == 200
    assert request(cluster.address, "/ready").status == 200


def test_the_timeline_names_every_stage(cluster: Cluster) -> None:
    body = {
        "messages": [user(another_picture(), "Describe the image.")],
        "temperature": 0,
        "timeline": True,
    }
    phases = cluster.chat(body).json["timeline"]["phases"]
    names = " ".join(phase["name"] for phase in phases)
    for part in ("encode", "embedding transfer", "prefill", "kv transfer", "decode"):
        assert part in names, names
    assert all(phase["duration_ms"] >= 0 for phase in phases)
    moved = [phase["bytes"] for phase in phases if "transfer" in phase["name"]]
    assert all(size > 0 for size in moved)


def test_tensors_travel_through_mooncake_and_are_counted(cluster: Cluster, client: OpenAI) -> None:
    def moved() -> dict[str, float]:
        return {
            "embedding": _counter(cluster.worker("prefill").metrics(), "embedding"),
            "kv": _counter(cluster.worker("decode").metrics(), "kv"),
        }

    before = moved()
    answer(client, another_picture(), "Describe the image.")
    after = moved()
    assert after["embedding"] > before["embedding"]
    assert after["kv"] > before["kv"]


def _counter(text: str, kind: str) -> float:
    """Sum over epd_transfer_bytes_total samples of one kind."""
    return sum(
        float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith("epd_transfer_bytes_total") and f'kind="{kind}"' in line
    )
