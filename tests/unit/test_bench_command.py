"""`epd bench` from the command line to its files, against scripted servers over real HTTP.
Only counts are looked at here; times are the virtual clock's business."""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from epd.bench import campaign
from epd.bench.campaign import Plan, Results
from epd.bench.ceiling import scripted_server
from epd.bench.report import command
from epd.cli import app


def test_two_targets_side_by_side(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "run.json", tmp_path / "run.png"
    with scripted_server(5) as one, scripted_server(7) as two:
        arguments = ["bench", "--target", f"one={one}", "--target", f"two={two}"]
        arguments += ["--concurrency", "1,3", "--requests", "4", "--rounds", "2"]
        arguments += ["--image", "56x28", "--json", str(out), "--plot", str(plot)]
        result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "two / one" in result.output
    found = json.loads(out.read_text())
    assert len(found["requests"]) == 2 * 2 * 2 * 4, "targets, loads, kept rounds, requests"
    for request in found["requests"]:
        assert not request["error"], request
        assert len(request["arrivals"]) == {"one": 5, "two": 7}[request["target"]]
        assert request["images"] == 1
    assert {row["load"] for row in found["summaries"]} == {"concurrency 1", "concurrency 3"}
    assert found["workload"]["image"] == ["56x28"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_trace(tmp_path: Path) -> None:
    out, trace = tmp_path / "run.json", tmp_path / "trace.jsonl"
    picture = {"kind": "picture", "images": [{"width": 28, "height": 28, "id": 1}]}
    kinds: list[dict[str, Any]] = [{"kind": "chat"}, picture]
    rows = [
        {"at_s": 0.01 * n, "text_tokens": 9, "output_tokens": 5, **kind}
        for n, kind in enumerate(kinds * 2)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with scripted_server(5) as url:
        arguments = ["bench", "--target", f"one={url}", "--trace", str(trace), "--rounds", "1"]
        arguments += ["--speed", "1,2", "--slo-ttft", "9", "--slo-tpot", "9", "--json", str(out)]
        result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["summaries"]
    assert [(row["load"], row["kind"], row["ok"]) for row in rows] == [
        (f"trace {speed}", kind, count)
        for speed in (1, 2)
        for kind, count in (("", 4), ("chat", 2), ("picture", 2))
    ]
    assert all(row["good_share"] == 1.0 for row in rows)


SAMPLE = Path(__file__).parents[2] / "bench" / "traces" / "servegen_mm_sample.jsonl"


@pytest.mark.parametrize(
    ("flags", "requests", "repeated"),
    [([], 120, True), (["--requests", "40"], 40, True), (["--image-pool", "0"], 120, False)],
)
def test_a_trace_is_whole_and_its_pictures_repeat_unless_flags_say_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], requests: int, repeated: bool
) -> None:
    out, plans = tmp_path / "run.json", []

    async def measured(targets: Any, plan: Plan, tell: Any) -> Results:
        plans.append(plan)
        return Results(["one"])

    monkeypatch.setattr("epd.bench.campaign.measure", measured)
    with scripted_server(1) as url:
        arguments = ["bench", "--target", f"one={url}", "--trace", str(SAMPLE), *flags]
        result = CliRunner().invoke(app, [*arguments, "--json", str(out)])
    assert result.exit_code == 0, result.output
    (plan,) = plans
    (load,) = plan.loads
    played = plan.workload.timed(load, 1)
    pictures = Counter(picture for one in played for picture in one.shape.pictures)
    assert (len(played), max(pictures.values()) > 1) == (requests, repeated)
    said = f"the first {requests} of 120 requests" if requests < 120 else "all 120 requests"
    different = f"{pictures.total()} pictures, {len(pictures)} of them different"
    assert f"{SAMPLE}: {said}; {different}" in result.output
    workload = json.loads(out.read_text())["workload"]
    assert (workload["requests"] or 120, workload["image_pool"]) == (requests, 8 * repeated)


def test_the_key_is_in_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run.json"
    with scripted_server(2) as url:
        arguments = ["bench", "--target", f"one={url}", "--requests", "1", "--rounds", "1"]
        arguments += ["--api-key", "sk-secret", "--json", str(out)]
        monkeypatch.setattr("sys.argv", ["epd", *arguments])
        result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert b"sk-secret" not in out.read_bytes()
    assert "--api-key ... --json" in json.loads(out.read_text())["command"]
    assert command(["bench", "--api-key=sk-secret"]) == "epd bench --api-key=..."


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--json", "{taken}/run.json"], "--json"),
        (["--plot", "/dev/null/run.png"], "--plot"),
        (["--concurrency", "inf"], "--concurrency"),
        (["--rate", "nan"], "--rate"),
        (["--concurrency", "1,2.5"], "--concurrency"),
        (["--target", "one=http://127.0.0.1:9/v1"], "--target"),
        (["--target", "http://127.0.0.1:9/v1"], "--target"),
        (["--target", "two=127.0.0.1:9/v1"], "--target"),
        (["--target", "two=http://127.0.0.1:9x/v1"], "--target"),
        (["--target", "two=http:///v1"], "--target"),
        (["--extra", 'two={{"top_k": 1}}'], "--extra"),
        (["--pid", "two=1"], "--pid"),
    ],
)
def test_what_can_not_be_is_said_before_anything_is_measured(
    tmp_path: Path, flags: list[str], named: str
) -> None:
    taken = tmp_path / "file"
    taken.touch()
    wanted = [flag.format(taken=taken) for flag in flags]
    # Nobody listens there: who measured first would say so.
    arguments = ["bench", "--target", "one=http://127.0.0.1:9/v1", *wanted]
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.output.startswith(f"epd bench: {named}")) == (2, True)


def test_a_call_without_a_target_is_a_wrong_call() -> None:
    result = CliRunner().invoke(app, ["bench"])
    assert (result.exit_code, result.output) == (
        2,
        "epd bench: give at least one --target NAME=URL\n",
    )


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Base URL of a server that says this to the first who connects; b"": nothing, ever.
    Who gave up before it connected, on a crowded machine, is not waited for."""
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            try:
                connection, _ = listening.accept()
            except OSError:  # shut down
                return
            with connection:
                connection.recv(65536)
                connection.sendall(answer)
                done.wait(60)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        done.set()
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_what_a_server_says_of_its_models_is_passed_on() -> None:
    refusal = b'{"error": {"message": "no valid API key"}}'
    with answering(
        b"HTTP/1.1 401 No\r\nContent-Length: %d\r\n\r\n%s" % (len(refusal), refusal)
    ) as url:
        result = CliRunner().invoke(app, ["bench", "--target", f"one={url}"])
    assert result.exit_code == 1
    assert "http_401" in result.output
    assert "no valid API key" in result.output


def test_where_nobody_listens_it_is_said_in_words() -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # and never listens
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/v1"
        result = CliRunner().invoke(app, ["bench", "--target", f"one={url}"])
    assert result.exit_code == 1
    assert "Cannot connect to host 127.0.0.1" in result.output
    assert "ConnectionKey" not in result.output


def test_a_server_that_lists_no_models_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(campaign, "_CALIBRATION_TIMEOUT_S", 0.05)
    with answering(b"") as url:
        result = CliRunner().invoke(app, ["bench", "--target", f"one={url}"])
    assert result.exit_code == 1
    assert "list of models" in result.output


@pytest.mark.parametrize("streams", ["1.5", "0.5", "x"])
def test_the_ceiling_of_half_a_stream_is_a_wrong_call(streams: str) -> None:
    result = CliRunner().invoke(app, ["bench", "ceiling", "--streams", streams])
    assert (result.exit_code, result.output.startswith("epd bench: --streams")) == (2, True)


def test_the_ceiling() -> None:
    result = CliRunner().invoke(app, ["bench", "ceiling", "--streams", "2", "--events", "20"])
    assert result.exit_code == 0, result.output
    assert "2 streams" in result.output
    assert "us of client CPU an event" in result.output
