"""What the doctor finds missing, and which Mooncake build it asks for."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import pytest

from epd import doctor
from epd.config import Config
from epd.config_sources import load_config
from epd.doctor import Finding, Level
from epd.errors import EpdError, invalid
from epd.wheel import require_mooncake, torch_cuda_major, wheel_problem

DEMO = Path(__file__).parents[2] / "demo" / "checkpoint"
CPU, CUDA, CUDA13 = (
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
)


@pytest.mark.parametrize(
    ("wheels", "device", "cuda_major"),
    [
        ([CPU], "cpu", None),
        ([CPU], "cpu", 13),  # torch's default build on a machine without a GPU
        ([CUDA], "cuda", 12),
        ([CUDA13], "cuda:1", 13),
        ([CUDA], "cpu", 12),  # a GPU machine serving from its CPU
        ([CUDA13], "cpu", 13),
    ],
)
def test_fitting_builds(wheels: list[str], device: str, cuda_major: int | None) -> None:
    assert wheel_problem(dict.fromkeys(wheels, "1"), device, cuda_major) is None


@pytest.mark.parametrize(
    ("wheels", "device", "cuda_major", "says"),
    [
        ([], "cpu", None, "not installed: pip install 'epd[cpu]'"),
        ([], "cuda", 12, "epd[cuda]"),
        ([], "cuda", 13, "epd[cuda13]"),
        ([CPU, CUDA], "cpu", None, "overwrite each other"),
        ([CUDA], "cpu", None, "wrong Mooncake build: torch is a CPU build"),
        ([CPU], "cuda", 12, "pip install 'epd[cuda]'"),
        ([CUDA], "cuda", 13, "pip install 'epd[cuda13]'"),
        # A CPU worker too: each row one of the two versions, or the cure.
        ([CUDA], "cpu", 13, f"{CUDA} (built for CUDA 12) is the wrong Mooncake build"),
        ([CUDA], "cpu", 13, "torch is built for CUDA 13 and the device is cpu"),
        ([CUDA], "cpu", 13, "pip install 'epd[cuda13]'"),
        ([CUDA13], "cpu", 12, f"{CUDA13} (built for CUDA 13) is the wrong Mooncake build"),
        ([CUDA13], "cpu", 12, "pip install 'epd[cuda]'"),
        ([CUDA13], "cpu", 11, "pip install 'epd[cpu]'"),  # no build is for CUDA 11
        ([CPU], "cuda", None, "torch is built without CUDA"),
        ([CUDA], "cuda", 11, "torch is built for CUDA 11"),
    ],
)
def test_wrong_builds_are_named_with_the_cure(
    wheels: list[str], device: str, cuda_major: int | None, says: str
) -> None:
    problem = wheel_problem(dict.fromkeys(wheels, "1"), device, cuda_major)
    assert problem is not None
    assert says in problem
    assert "\n" not in problem


def test_the_build_installed_here_is_accepted() -> None:
    assert require_mooncake("cpu") in (CPU, CUDA, CUDA13)


def test_torch_cuda_version_is_read_without_importing_it() -> None:
    import torch

    expected = torch.version.cuda
    assert torch_cuda_major() == (int(expected.split(".")[0]) if expected else None)


def test_a_used_port_that_serving_needs_is_a_finding() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = {"gateway.http_port": port, "gateway.grpc_port": 0, "worker.port": port - 1}
        found = list(doctor._ports(load_config(None, settings, {})))
    assert [f for f in found if f.subject == "gateway.grpc_port"] == []  # any free one
    (http,) = [f for f in found if f.subject == "gateway.http_port"]
    assert http.level is Level.MISSING
    assert http.detail.startswith(f"127.0.0.1:{port}: Address already in use")
    # Three workers take the port that is configured and the next two.
    workers = [f for f in found if f.subject == "worker.port"]
    assert [f"127.0.0.1:{port - 1 + i}" in f.detail for i, f in enumerate(workers)] == [True] * 3
    assert workers[1].level is Level.MISSING


def test_a_missing_module_is_a_finding() -> None:
    missing = doctor._import("no_such_module_anywhere")
    assert missing.level is Level.MISSING
    assert "no_such_module_anywhere" in missing.detail


def test_a_library_that_kills_its_process_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deadly.py").write_text("import os; os.abort()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    finding = doctor._import("deadly")
    assert finding.level is Level.MISSING
    assert "-6" in finding.detail


def test_a_checkpoint_that_is_not_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    finding = doctor._checkpoint(load_config(None, {"model.path": str(tmp_path)}, {}))
    assert finding.level is Level.MISSING
    assert str(tmp_path) in finding.detail


@pytest.mark.parametrize(
    ("size", "reason"), [(0, "this weights file is empty"), (2_000_000, "is cut off")]
)
def test_a_weights_file_that_is_not_whole(tmp_path: Path, size: int, reason: str) -> None:
    folder = Path(shutil.copytree(DEMO, tmp_path / "copy"))
    os.truncate(folder / "model.safetensors", size)
    finding = doctor._checkpoint(load_config(None, {"model.path": str(folder)}, {}))
    assert finding.level is Level.MISSING
    assert reason in finding.detail
    assert finding.detail.startswith(f"{folder / 'model.safetensors'}: ")


@pytest.mark.parametrize("name", ["nope", "empty"])
def test_a_path_is_said_once(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    finding = doctor._checkpoint(load_config(None, {"model.path": str(tmp_path / name)}, {}))
    assert finding.level is Level.MISSING
    assert finding.detail.count(str(tmp_path / name)) == 1


def test_stages_that_can_not_serve_are_a_finding() -> None:
    config = load_config(None, {"serve.stages": ["encode"]}, {})
    last = list(doctor.examine(lambda: config))[-1]
    assert (last.subject, last.level) == ("configuration", Level.MISSING)
    assert "no process hosts prefill" in last.detail


def test_brackets_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    doctor._print([Finding("wheel[s]", Level.MISSING, "pip install 'epd[cpu]'")])
    assert capsys.readouterr().out.split() == [
        "what", "state", "detail", "wheel[s]", "missing", "pip", "install", "'epd[cpu]'",
    ]  # fmt: skip


def test_exit_code_and_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_ports", lambda _: ())  # others may have them
    monkeypatch.setattr(doctor, "_IMPORTS", ("json",))
    assert doctor.diagnose(Config) == 0
    monkeypatch.setattr(doctor, "_IMPORTS", ("json", "no_such_module"))
    assert doctor.diagnose(Config) == 1
    captured = capsys.readouterr()
    assert "no_such_module" in captured.err

    def broken() -> Config:
        raise invalid("configuration: kv: bad")

    monkeypatch.setattr(doctor, "_IMPORTS", ())
    assert doctor.diagnose(broken) == 1
    assert "configuration: kv: bad" in capsys.readouterr().out


@pytest.mark.parametrize("installed", [{}, {CPU: "1", CUDA: "1"}])
def test_the_engine_does_not_start_on_a_wrong_build(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]
) -> None:
    from epd.config import TransferConfig
    from epd.transfer.settings import load_mooncake

    monkeypatch.setattr("epd.wheel.installed_wheels", lambda: installed)
    with pytest.raises(EpdError, match=r"pip install 'epd\[cpu\]'"):
        load_mooncake(TransferConfig())
