"""Ratios of `epd bench stage`, and its processes."""

from __future__ import annotations

import json
import random
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from epd.bench.stage.case import Case, cells, interleave, row
from epd.bench.stage.peer import FINGERPRINT, Memory, content
from epd.bench.stage.raw_socket import receiver
from epd.bench.stage.run import PARTS, hand_off
from epd.bench.stage.transfer import NBYTES, SPAN, pulling
from epd.cli import app
from epd.config import TransferConfig
from epd.errors import EpdError, ErrorKind
from epd.transfer.bare import BareReader
from epd.transfer.contract import Handle, Span

DEMO = Path(__file__).parents[2] / "demo" / "checkpoint"


def timed(case: Case, *seconds: float) -> Case:
    case.wall, case.cpu = list(seconds), list(seconds)
    return case


def test_times_over_the_floor_and_shares_of_a_rate() -> None:
    floor = timed(Case("read", print), 0.01, 0.02, 0.03)
    decode = timed(Case("decode", print, base=floor), 0.03, 0.03, 0.09)
    assert decode.ratio(statistics.median) == pytest.approx(1.5)
    assert decode.ratio(min) == pytest.approx(3.0)
    gemm = timed(Case("GEMM", print, 200.0, "Gflop/s"), 1.0)
    prefill = timed(Case("prefill", print, 300.0, "Gflop/s", gemm), 2.0)
    assert prefill.ratio(min) == pytest.approx(0.75), "150 a second of 200"
    assert row(prefill)["rate"] == pytest.approx(150 / 1e9)
    assert "0.75 of GEMM" in cells(row(prefill))
    assert "1.50 x read" in cells(row(decode))


def test_every_case_runs_once_a_round_and_once_to_warm_up() -> None:
    runs: list[str] = []
    cases = [Case(name, partial(runs.append, name)) for name in "abc"]
    interleave(cases, 4, random.Random(0))
    assert sorted(runs) == sorted("abc" * 5)
    assert [len(case.wall) for case in cases] == [4, 4, 4]
    assert len({tuple(runs[i : i + 3]) for i in range(3, 15, 3)}) > 1, "in random order"


def test_it_rests_before_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(time, "sleep", done.append)
    interleave([Case("a", partial(done.append, "run"))], 2, random.Random(0), pause_s=0.1)
    assert done == ["run", 0.1, "run", 0.1, "run"]


def test_the_hand_off_is_the_sum_of_its_parts() -> None:
    rows: list[dict[str, Any]] = [{"ratio": None}, {"ratio": 0.01}, {"ratio": 0.02}]
    assert hand_off(rows).startswith("hand-off: 3.0%")


def test_mooncake_starts_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    """It calls an error what is none; in services that is in the log, at debug level."""
    BareReader(TransferConfig())
    assert capfd.readouterr().err == ""


def test_a_raw_socket_brings_what_is_asked_for() -> None:
    into = bytearray(b"x" * 100_000)
    with receiver(200_000) as end:
        end.pull(memoryview(into))
        assert into == content(100_000), "as the peer's memory: not a page of zeros"
        into[:] = bytes(100_000)
        end.pull(memoryview(into)[:10])
    assert into == content(10) + bytes(99_990)


def test_a_pull_brings_the_peers_bytes_and_checks_them() -> None:
    with pulling() as pull:
        spans = [(at, SPAN) for at in range(0, 4 * SPAN, SPAN)]
        handle = pull.announce(spans)
        pull.run(handle, [at for at, _ in spans], verify=True)
        assert pull.here.bytes[: 4 * SPAN] == content(NBYTES)[: 4 * SPAN]
        assert pull.leases.open_count == 0
        first = handle.spans[0]
        wrong = Span(first.address, first.length, first.checksum ^ 1)
        broken = Handle(handle.owner, handle.contract, (wrong,), handle.read_deadline_ms)
        with pytest.raises(EpdError) as caught:
            pull.run(broken, [0], verify=True)
        assert caught.value.kind is ErrorKind.CHECKSUM_MISMATCH
    assert FINGERPRINT
    assert Memory(4096).address % 4096 == 0


def test_the_command_runs_every_part(tmp_path: Path) -> None:
    out = tmp_path / "stage.json"
    arguments = ["bench", "stage", str(DEMO), "--rounds", "1", "--side", "56", "--chunk", "32"]
    arguments += ["--kernels-off", "--int8"]
    result = CliRunner().invoke(app, [*arguments, "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert set(PARTS) < set(json.loads(out.read_text()))
    for part in PARTS:
        assert f"\n{part}: 1 rounds, 1 threads\n" in result.output
    assert "of GEMM" in result.output
    assert "hand-off:" in result.output
    assert '"decode 8"' in out.read_text()
    result = CliRunner().invoke(app, [*arguments, "--only", "nonsense"])
    assert result.exit_code == 2
