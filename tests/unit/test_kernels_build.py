"""Compiling at first use: once, by one process, into a folder nobody else can write to."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from epd.models.kernels import build

needs_compiler = pytest.mark.skipif(
    build.find_compiler() is None or not torch.cpu._is_avx512_bf16_supported(),
    reason="no compiler, or a CPU without AVX512_BF16",
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.load.cache_clear()
    yield tmp_path / "epd" / "kernels"
    build.load.cache_clear()


@needs_compiler
def test_processes_that_start_together_get_one_whole_library(cache: Path) -> None:
    code = "from epd.models.kernels import build; print(build.load().id)"
    workers = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    ids = {worker.communicate(timeout=120)[0] for worker in workers}
    assert len(ids) == 1
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    (library,) = cache.glob("*.so")
    assert ctypes.CDLL(str(library)).epd_linear
    assert sorted(path.name for path in cache.iterdir()) == sorted([library.name, "lock"])


@needs_compiler
def test_a_failed_compilation_is_said_and_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-DPANEL=oops", "-Dnamespace=oops"))
    build._code_digest.cache_clear()
    assert build.load() is None
    assert "the compiler failed" in caplog.text
    assert not list(cache.glob("*.so"))
    build._code_digest.cache_clear()


def test_what_a_killed_compilation_left_is_removed(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next one; what is there for others to load stays."""
    folder = build.cache_folder()
    left = folder / "tmpkilled"
    left.mkdir()
    (left / "epd-half.so").write_bytes(b"half")
    (folder / "epd-other.so").write_bytes(b"whole")
    monkeypatch.setattr(build, "_digest", lambda compiler: "this")
    monkeypatch.setattr(build, "_compile", lambda compiler, path: path.write_bytes(b"new"))
    assert build._built("c++", folder) == folder / "epd-this.so"
    names = sorted(path.name for path in cache.iterdir())
    assert names == ["epd-other.so", "epd-this.so", "lock"]


def test_without_a_compiler_there_are_no_kernels(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert build.load() is None
    assert "no C++ compiler" in caplog.text


def test_without_the_instructions_nothing_is_compiled(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert build.load() is None
    assert not cache.exists()


def test_a_folder_that_others_can_write_to_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert build.load() is None
    with pytest.raises(PermissionError, match="writable by no other"):
        build.cache_folder()


@needs_compiler
def test_other_code_is_another_library(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = build.find_compiler()
    assert compiler is not None
    one = build._digest(compiler)
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-O1"))
    build._code_digest.cache_clear()
    assert build._digest(compiler) != one
    build._code_digest.cache_clear()
