"""`make gpu-check` before any device is asked: its report, and the Mooncake build it needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.gpu_check import Part, report
from deploy import mooncake_build

CPU, CUDA = "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"


def test_a_part_that_raises_has_failed_and_the_others_stay(tmp_path: Path) -> None:
    out = tmp_path / "gpu-check.md"

    def tests() -> tuple[bool, list[str]]:
        assert "## Tests\n\nnot ended" in out.read_text()
        return True, ["5 passed"]

    def decode() -> tuple[bool, list[str]]:
        told = out.read_text()
        assert "5 passed" in told, "written before the next part begins"
        assert told.endswith("## Decode\n\nnot ended\n"), "what a process that ends leaves"
        raise RuntimeError("CUDA error: out of memory")

    assert not report(out, {"Tests": tests, "Decode": decode, "Last": lambda: (True, ["well"])})
    told = out.read_text()
    assert "not ended" not in told
    assert "## Tests\n\n5 passed\n" in told
    assert "## Decode\n\n**failed**" in told
    assert "RuntimeError: CUDA error: out of memory" in told
    assert "## Last\n\nwell\n" in told


@pytest.mark.parametrize("well", [True, False])
def test_the_report_says_whether_all_went_well(tmp_path: Path, well: bool) -> None:
    parts: dict[str, Part] = {"Tests": lambda: (well, []), "Decode": lambda: (True, [])}
    assert report(tmp_path / "gpu-check.md", parts) is well


@pytest.mark.parametrize(
    ("installed", "major", "extra", "removed", "brought"),
    [
        ([CPU], 12, "", [CPU], "cuda"),
        ([CPU], 13, "", [CPU], "cuda13"),
        ([CPU, CUDA], 12, "", [CPU, CUDA], "cuda"),
        ([], 12, "", [], "cuda"),
        ([CUDA], 12, "", [], ""),
        ([CUDA], 12, "cuda", [], ""),
        ([CUDA], 12, "cuda13", [CUDA], "cuda13"),
        ([CPU], None, "", [], ""),
    ],
)
def test_mooncakes_build_becomes_torchs(
    monkeypatch: pytest.MonkeyPatch,
    installed: list[str],
    major: int | None,
    extra: str,
    removed: list[str],
    brought: str,
) -> None:
    monkeypatch.setattr(mooncake_build, "installed_wheels", lambda: dict.fromkeys(installed, "1"))
    monkeypatch.setattr(mooncake_build, "torch_cuda_major", lambda: major)
    commands: list[Sequence[str]] = []
    told = mooncake_build.fit(commands.append, extra)
    gone = [
        word for command in commands if "uninstall" in command for word in command[-len(removed) :]
    ]
    assert gone == removed
    came = [command[-1].partition("[")[2] for command in commands if "install" in command]
    assert came == ([f"{brought}]"] if brought else [])
    assert (f"epd[{brought}]" in told) is bool(brought)


def test_without_a_device_nothing_is_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(mooncake_build, "device_visible", lambda: False)
    monkeypatch.setattr(mooncake_build, "fit", never)
    monkeypatch.setattr("sys.argv", ["mooncake_build"])
    mooncake_build.main()
