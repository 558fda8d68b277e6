"""Compiling and loading the kernels: once for each machine, in seconds.

The library is named by a digest of everything that its bits depend on, so a stale one
is never loaded. Processes that start together compile once: the first holds a lock,
the others wait for its file. It appears under its name by an atomic rename, complete
or not at all.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

logger = logging.getLogger(__name__)

SOURCES: Final = (
    *("linear.cpp", "linear_int8.cpp", "attention.cpp", "layer.cpp"),
    *("dense.cpp", "vision.cpp", "best.cpp", "decode.cpp"),
)
_HEADERS: Final = (
    *("common.h", "tile.h", "pack.h", "rows.h", "across.h"),
    *("linear.h", "panels.h", "attention.h", "task.h", "few_rows.h", "many_rows.h", "dense.h"),
)
# No -ffast-math: linking with it sets flush-to-zero for the whole process. No
# contraction: which additions are fused is not the compiler's to choose.
_FLAGS: Final = (
    *("-O3", "-march=native", "-std=c++17", "-ffp-contract=off", "-fno-math-errno"),
    *("-fopenmp", "-fPIC", "-shared"),
)
_FOLDER: Final = Path(__file__).parent
_COMPILE_TIMEOUT_S: Final = 120.0
_UNFINISHED: Final = "tmp"
"""How the names of folders begin that are compiled in."""


@dataclass(frozen=True, slots=True)
class Library:
    """A loaded library. Its memory is never unmapped."""

    handle: ctypes.CDLL
    id: str
    """Names the code: libraries with equal ids compute equal bits on equal CPUs."""


@functools.cache
def load() -> Library | None:
    """The kernels, compiled if need be; None, and one line in the log, without them.

    May take seconds the first time. Threads and processes may call it together.
    """
    if not torch.cpu._is_avx512_bf16_supported():
        logger.info("no kernels: they need a CPU with AVX512_BF16")
        return None
    compiler = find_compiler()
    if compiler is None:
        logger.warning("no kernels: no C++ compiler found (c++, g++ or clang++)")
        return None
    try:
        path = _built(compiler, cache_folder())
        return Library(ctypes.CDLL(str(path)), _code_digest())
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: no home
        logger.warning("no kernels: %s", _reason(error))
        return None


def find_compiler() -> str | None:
    """$CXX, or the first of the usual names that is there."""
    names = [os.environ.get("CXX", ""), "g++", "c++", "clang++"]
    return next((path for name in names if name and (path := shutil.which(name))), None)


def cache_folder() -> Path:
    """A folder that only this user can write to; made here.

    Raises:
        OSError: it can't be made, or others could put code into it.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "epd" / "kernels"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder} must belong to this user and be writable by no other")
    return folder


def _built(compiler: str, folder: Path) -> Path:
    path = folder / f"epd-{_digest(compiler)}.so"
    if path.exists():
        return path
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _remove_unfinished(folder)
        if not path.exists():
            _compile(compiler, path)
    return path


def _remove_unfinished(folder: Path) -> None:
    """What compilations left that were killed: whoever has the lock is the only one."""
    for left in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)


def _compile(compiler: str, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=_UNFINISHED) as work:
        made = Path(work) / path.name
        sources = [str(_FOLDER / name) for name in SOURCES]
        command = [compiler, *_FLAGS, *sources, "-o", str(made)]
        subprocess.run(
            command,
            check=True,
            capture_output=True,
            text=True,
            timeout=_COMPILE_TIMEOUT_S,
            env=os.environ | {"TMPDIR": work},  # the compiler's own, too, go with the folder
        )
        os.replace(made, path)
    logger.info("kernels compiled: %s", path)


def _reason(error: BaseException) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line for line in error.stderr.splitlines() if "error" in line]
        return f"the compiler failed: {lines[0] if lines else error.returncode}"
    return str(error)


@functools.cache
def _code_digest() -> str:
    digest = hashlib.blake2b(" ".join(_FLAGS).encode(), digest_size=4)
    for name in (*SOURCES, *_HEADERS):
        digest.update((_FOLDER / name).read_bytes())
    return digest.hexdigest()


def _digest(compiler: str) -> str:
    """Of code, compiler and CPU: -march=native means this machine's instructions."""
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=30)
    digest = hashlib.blake2b(_code_digest().encode() + version.stdout, digest_size=16)
    digest.update(_cpu())
    return digest.hexdigest()


def _cpu() -> bytes:
    with open("/proc/cpuinfo", "rb") as lines:
        wanted = (b"vendor_id", b"cpu family", b"model\t", b"flags")
        return b"".join(sorted({line for line in lines if line.startswith(wanted)}))
