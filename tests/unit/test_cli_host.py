"""One stage process from the outside: exit codes, one-line reasons, Ctrl-C as SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from epd import host
from epd.config import Config
from epd.config_sources import load_config
from epd.cpus import joined
from epd.errors import EpdError, invalid

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def unchanged_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve_stage` sets handlers and variables of its own process, which is ours here."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    # There is no checkpoint to look at; what it finds: test_preflight.py.
    monkeypatch.setattr(host, "_check", lambda role, config: None)


def stage(monkeypatch: pytest.MonkeyPatch, outcome: BaseException | None) -> None:
    async def serve(config: Config) -> None:
        if outcome is not None:
            raise outcome

    def find(role: str) -> Any:
        return serve

    monkeypatch.setattr(host, "_serve_of", find)


def test_a_clean_end_is_0(monkeypatch: pytest.MonkeyPatch) -> None:
    stage(monkeypatch, None)
    assert host.serve_stage("encode", Config()) == 0


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (invalid("the weights\nare missing", "model.path"), "epd encode: the weights are missing"),
        (OSError(98, "in use"), "epd encode: OSError: [Errno 98] in use"),
        (
            ImportError("No module named 'torch'"),
            "epd encode: ImportError: No module named 'torch'",
        ),
    ],
)
def test_a_reason_for_not_starting_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    line: str,
) -> None:
    stage(monkeypatch, error)
    assert host.serve_stage("encode", Config()) == 1
    assert capsys.readouterr().err == line + "\n"


def test_a_bug_of_ours_shows_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    stage(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        host.serve_stage("encode", Config())


def test_threads_are_set_before_anything_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    stage(monkeypatch, None)
    host.serve_stage("decode", Config.model_validate({"model": {"threads": 3}}))
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_a_stage_may_have_threads_and_cores_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    stage(monkeypatch, None)
    pinned: list[object] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: pinned.append(cpus))
    tree = {"model": {"threads": 3}, "decode": {"threads": 2, "cpus": "0,2-4"}}
    for role, threads in (("decode", "2"), ("prefill", "3"), ("gateway", "3")):
        assert host.serve_stage(role, Config.model_validate(tree)) == 0
        assert os.environ["OMP_NUM_THREADS"] == threads
    assert pinned == [{0, 2, 3, 4}]


def test_cores_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stage(monkeypatch, None)
    config = Config.model_validate({"decode": {"cpus": "900"}})
    assert host.serve_stage("decode", config) == 1
    assert "cores 900: none of them is there" in capsys.readouterr().err


STAND_IN = """
import asyncio, atexit, signal, sys
from epd import host
from epd.config import Config

class Late:
    def __del__(self):
        print("taken apart", flush=True)

kept = Late()

async def serve(config):
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    atexit.register(print, "exit functions run", flush=True)  # as imported modules do
    print("up", flush=True)
    await stop.wait()
    print("drained", flush=True)

host._serve_of = lambda role: serve
host._check = lambda role, config: None
sys.exit(host.run_stage("encode", Config()))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_drains_and_the_process_ends_at_once(number: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STAND_IN], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(number)
    rest, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert rest.splitlines() == ["drained", "exit functions run"]


def test_several_stages_have_the_largest_number_of_threads_and_all_their_cores() -> None:
    config = load_config(
        None,
        {"model.threads": 1, "prefill.threads": 2, "prefill.cpus": "0", "decode.cpus": "1"},
        {},
    )
    assert config.for_stages(["prefill", "decode"]).model.threads == 2
    assert config.for_stages(["encode", "decode"]).model.threads == 1
    assert joined(["0", "1-2"]) == "0,1-2"
    assert joined(["0", ""]) == "", "encode may run anywhere, so this process may"


def test_stages_that_share_weights_can_not_want_different_ones() -> None:
    from epd.jobs import Stage
    from epd.runtime.resources import Resources

    config = load_config(None, {"model.quantize": "int8-decode"}, {})
    with pytest.raises(EpdError, match="share them"):
        _ = Resources(config, [Stage.PREFILL, Stage.DECODE]).lm
