"""The whole service as its users see it: right answers, clear refusals, nothing left over."""

from __future__ import annotations

import base64
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from openai import OpenAI

from tests.e2e.cluster import DEMO_CHECKPOINT, ROOT, STAGES, Cluster, Reply, request, still_runs
from tests.e2e.conftest import MakeCluster, demo_questions, image_part, picture, user

COLOUR = "What colour is the circle?"


def answer(client: OpenAI, *parts: str | bytes, **options: Any) -> str:
    completions: Any = client.chat.completions
    model = client.models.list().data[0].id
    options = {"temperature": 0, **options}
    reply = completions.create(model=model, messages=[user(*parts)], **options)
    return str(reply.choices[0].message.content)


# --- right answers ----------------------------------------------------------------------


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
    # A picture that no cache holds: noise in one pixel is enough for another digest.
    data = _png(96, 96, int(time.time()) & 0xFF)
    body = {"messages": [user(data, "Describe the image.")], "temperature": 0, "timeline": True}
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
    answer(client, _png(96, 96, 1 + (int(time.time()) & 0x7F)), "Describe the image.")
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


# --- refusals ---------------------------------------------------------------------------


def _png(width: int, height: int, shade: int = 128) -> bytes:
    """A grey picture, and with huge sizes a header that nobody should decode."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = b"" if width * height > 1 << 24 else (b"\0" + bytes([shade]) * width) * height
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def _bad_bodies() -> dict[str, tuple[dict[str, Any], str, str]]:
    """Name -> (body, the field that the error names, its code)."""
    whole = picture("three_shapes.png")
    not_base64 = {"type": "image_url", "image_url": {"url": "data:image/png;base64,!!!"}}
    return {
        "not an image": (
            {"messages": [user(b"This is no picture at all.", COLOUR)]},
            "messages[0].content[0]",
            "invalid_image",
        ),
        "truncated image": (
            {"messages": [user(COLOUR, whole[: len(whole) // 2])]},
            "messages[0].content[1]",
            "invalid_image",
        ),
        "too many pixels": (
            {"messages": [user("Look.", _png(30000, 30000), COLOUR)]},
            "messages[0].content[1]",
            "image_too_large",
        ),
        "not base64": (
            {"messages": [{"role": "user", "content": [not_base64]}]},
            "messages[0].content[0]",
            "invalid_image",
        ),
        "unknown model": (
            {"model": "gpt-9000", "messages": [user(COLOUR)]},
            "model",
            "model_not_found",
        ),
        "context too long": (
            {"messages": [user("word " * 30000)]},
            "messages",
            "context_length_exceeded",
        ),
        "empty messages": ({"messages": []}, "messages", "invalid_request"),
        "no messages": ({}, "messages", "invalid_request"),
        "unknown role": (
            {"messages": [{"role": "wizard", "content": "hi"}]},
            "messages[0].role",
            "invalid_request",
        ),
        "temperature out of range": (
            {"messages": [user(COLOUR)], "temperature": -1},
            "temperature",
            "invalid_request",
        ),
        "max_tokens of nothing": (
            {"messages": [user(COLOUR)], "max_tokens": 0},
            "max_tokens",
            "invalid_request",
        ),
    }


BAD_BODIES = _bad_bodies()


@pytest.mark.parametrize("name", BAD_BODIES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_bad_input_is_400_and_names_the_field(cluster: Cluster, name: str, stream: bool) -> None:
    body, param, code = BAD_BODIES[name]
    pids = cluster.pids
    reply = cluster.chat(body | {"stream": stream})
    assert reply.status == 400, reply
    error = reply.error
    assert str(error["param"]).startswith(param), error
    assert error["code"] == code, error
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) > 10
    assert all(member.alive for member in cluster.members)
    assert cluster.pids == pids


def test_a_body_that_is_not_json(cluster: Cluster) -> None:
    reply = request(cluster.address, "/v1/chat/completions", raw=b"{nope")
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"


def test_bad_input_does_not_hurt_those_beside_it(client: OpenAI, cluster: Cluster) -> None:
    bodies = [body for body, _, _ in BAD_BODIES.values()]
    with ThreadPoolExecutor(6) as pool:
        good = [pool.submit(answer, client, picture("red_circle.png"), COLOUR) for _ in range(4)]
        bad = list(pool.map(cluster.chat, bodies))
        assert {reply.status for reply in bad} == {400}
        assert {future.result() for future in good} == {"The circle is red."}


# --- a client that goes away ------------------------------------------------------------


def test_a_client_that_goes_away_frees_everything(cluster: Cluster) -> None:
    import http.client
    import json

    body = {
        "model": cluster.model,
        "messages": [user(picture("three_shapes.png"), "Describe the image.")],
        "max_tokens": 512,
        "ignore_eos": True,
        "stream": True,
    }
    connection = http.client.HTTPConnection(cluster.address, timeout=30)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    assert response.status == 200
    assert response.read(200)
    assert cluster.unclean(), "nothing was running when the client left"
    response.close()
    connection.close()
    cluster.assert_clean(limit_s=5)


# --- dead stages ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mortal(make_cluster: MakeCluster) -> Cluster:
    """A service that tests may hurt; they leave it whole again."""
    return make_cluster()


def _ask(cluster: Cluster, model: str, shade: int, timeout_s: float = 30.0) -> Reply:
    """A question about a picture of its own, so that every stage has work to do."""
    messages = [user(_png(96, 96, shade), "Describe the image.")]
    body = {"model": model, "messages": messages, "temperature": 0}
    return request(cluster.address, "/v1/chat/completions", body, timeout_s)


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_stage_is_503_and_works_when_it_is_back(mortal: Cluster, stage: str) -> None:
    model, shade = mortal.model, 10 + STAGES.index(stage)
    assert _ask(mortal, model, shade).status == 200
    others = [member for member in mortal.members if member.role != stage]
    pids = [member.pid for member in others]
    mortal.worker(stage).end(signal.SIGKILL)
    reply = _ask(mortal, model, shade + 30)
    assert reply.status == 503, reply
    assert reply.seconds < 2.0
    assert reply.error["code"] in ("stage_unavailable", "transfer_failed")
    assert stage in reply.error["message"]
    assert request(mortal.address, "/health").status == 200
    mortal.restart(stage)
    assert _ask(mortal, model, shade + 60).status == 200
    assert [member.pid for member in others] == pids
    mortal.assert_clean()


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_killed_in_the_middle(mortal: Cluster, stage: str) -> None:
    """Requests under way end with a typed error or a whole answer; none hangs."""
    model, shade = mortal.model, 120 + 10 * STAGES.index(stage)
    with ThreadPoolExecutor(6) as pool:
        replies = [pool.submit(_ask, mortal, model, shade + i) for i in range(6)]
        time.sleep(0.15)
        mortal.worker(stage).end(signal.SIGKILL)
        done = [future.result() for future in replies]
    assert {reply.status for reply in done} <= {200, 503}
    for reply in done:
        if reply.status == 503:
            assert reply.error["type"] == "server_error"
    mortal.restart(stage)
    assert _ask(mortal, model, shade + 9).status == 200
    mortal.assert_clean()


@pytest.mark.parametrize("stage", STAGES)
def test_a_stopped_stage_is_an_error_within_8_seconds(mortal: Cluster, stage: str) -> None:
    model, shade = mortal.model, 200 + STAGES.index(stage)
    with mortal.paused(stage):
        reply = _ask(mortal, model, shade)
    assert reply.status == 503, reply
    assert reply.seconds < 8.0
    mortal.until_serving()
    assert _ask(mortal, model, shade + 10).status == 200
    mortal.assert_clean()


# --- epd serve --------------------------------------------------------------------------


def _serve(*arguments: str) -> subprocess.Popen[str]:
    ports = ("http_port", "grpc_port", "membership_port")
    settings = [part for port in ports for part in ("--set", f"gateway.{port}=0")]
    command = [sys.executable, "-m", "epd.cli", "serve", *arguments, *settings]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_ctrl_c_stops_all_processes() -> None:
    process = _serve(str(DEMO_CHECKPOINT))
    assert process.stdout is not None
    assert process.stderr is not None
    errors: list[str] = []
    threading.Thread(target=errors.extend, args=(process.stderr,), daemon=True).start()
    try:
        line = next((line for line in process.stdout if "serving" in line), None)
        assert line is not None, "".join(errors)
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 4
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0, "".join(errors)
    finally:
        process.kill()
    psutil.wait_procs(family, timeout=5)
    assert not [member for member in family if still_runs(member)]


def test_a_missing_checkpoint_is_a_reason(tmp_path: Any) -> None:
    process = _serve(str(tmp_path / "nothing"))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "not a checkpoint" in errors
    assert "Traceback" not in errors


def test_a_broken_checkpoint_is_a_reason(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    process = _serve(str(tmp_path))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    (reason,) = [line for line in errors.splitlines() if line.startswith("epd serve: can't start")]
    assert str(tmp_path) in reason
    assert "Traceback" not in errors


def test_base64_without_a_data_url_is_taken_or_refused_by_name(cluster: Cluster) -> None:
    """A bare base64 string is not a URL of ours: the error says what to write."""
    data = base64.b64encode(picture("red_circle.png")).decode()
    part = image_part(b"") | {"image_url": {"url": data}}
    reply = cluster.chat({"messages": [{"role": "user", "content": [part]}]})
    assert reply.status in (200, 400)
    if reply.status == 400:
        assert reply.error["param"].startswith("messages[0].content[0]")
