"""`epd doctor`: what is missing on this machine, before something fails because of it.

Works where torch, transformers or Mooncake are missing: it looks for them from outside,
and imports them in processes of their own.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from epd.config import Config

_SYSTEM_LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}
_IMPORTS = ("torch", "transformers", "mooncake.engine")
_IMPORT_LIMIT_S = 120.0
_MIB = 1 << 20
_PROCESS_MIB = 350
"""Memory of one worker beside its weights and pools (interpreter and libraries)."""
_IMPORTS_MIB, _FORK_MIB = 250, 100
"""Of the processes of `epd serve`, where they share their imports: once, and each."""


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. MISSING is what serving can't do without."""

    subject: str
    level: Level
    detail: str


def diagnose(load: Callable[[], Config]) -> int:
    """Print the report; 0 if nothing that serving needs is missing, else 1."""
    findings = list(examine(load))
    _print(findings)
    missing = [finding.subject for finding in findings if finding.level is Level.MISSING]
    if missing:
        print(f"epd doctor: missing or broken: {', '.join(missing)}", file=sys.stderr)
    return 1 if missing else 0


def examine(load: Callable[[], Config]) -> Iterator[Finding]:
    """All checks, cheapest first. `load` reads the configuration and may raise EpdError."""
    yield from _python()
    yield from _requirements()
    yield from _libraries()
    yield from map(_import, _IMPORTS)
    yield _compiler()
    from epd.supervisor import planned

    try:
        config = load()
        planned(config.serve)
    except Exception as error:  # whatever is broken is the finding
        yield Finding("configuration", Level.MISSING, str(error))
        return
    yield _wheel(config.model.device)
    yield from _ports(config)
    yield _memory(config)
    if config.model.path:
        yield _checkpoint(config)


def _python() -> Iterator[Finding]:
    version = sys.version.split()[0]
    level = Level.OK if sys.version_info >= (3, 11) else Level.MISSING
    yield Finding("python", level, f"{version} ({sys.executable})")
    level = Level.OK if sys.platform == "linux" else Level.WARNING
    yield Finding("platform", level, f"{sys.platform}, {os.cpu_count()} cores")


def _requirements() -> Iterator[Finding]:
    """Every package that our own metadata asks for, in a version that it allows."""
    try:
        required = metadata.requires("epd") or []
    except metadata.PackageNotFoundError:
        yield Finding("epd", Level.WARNING, "not installed as a package: versions not checked")
        return
    try:
        from packaging.requirements import Requirement
    except ImportError:
        yield Finding("packages", Level.MISSING, "'packaging' is missing; reinstall epd")
        return
    problems = []
    wanted = [item for item in map(Requirement, required) if _applies(item.marker)]
    for item in wanted:
        try:
            version = metadata.version(item.name)
        except metadata.PackageNotFoundError:
            problems.append(f"{item.name} is not installed")
            continue
        if not item.specifier.contains(version, prereleases=True):
            problems.append(f"{item.name} is {version}, needed is {item.specifier}")
    level = Level.MISSING if problems else Level.OK
    yield Finding("packages", level, "; ".join(problems) or f"all {len(wanted)} fit")


def _applies(marker: object) -> bool:
    """True for a requirement that belongs to no extra."""
    return marker is None or "extra" not in str(marker)


def _libraries() -> Iterator[Finding]:
    for name, package in _SYSTEM_LIBRARIES.items():
        try:
            ctypes.CDLL(name)
        except OSError:
            yield Finding(name, Level.MISSING, f"Mooncake needs it: apt-get install {package}")
        else:
            yield Finding(name, Level.OK, "found")


def _import(module: str) -> Finding:
    """Import in a process of its own: a broken library may end the process that loads it."""
    show = f"import {module} as m; print(getattr(m, '__version__', 'imports'))"
    command = [sys.executable, "-c", show]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_LIMIT_S)
    except subprocess.TimeoutExpired:
        return Finding(module, Level.MISSING, f"import takes longer than {_IMPORT_LIMIT_S:g} s")
    if done.returncode == 0:
        return Finding(module, Level.OK, done.stdout.strip().splitlines()[-1])
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return Finding(module, Level.MISSING, lines[-1])


def _compiler() -> Finding:
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return Finding("c++ compiler", Level.OK, path)
    return Finding(
        "c++ compiler",
        Level.WARNING,
        "none found: bfloat16 runs without the compiled kernels, slower",
    )


def _wheel(device: str) -> Finding:
    from epd.wheel import installed_wheels, torch_cuda_major, wheel_problem

    wheels = installed_wheels()
    problem = wheel_problem(wheels, device, torch_cuda_major())
    if problem:
        return Finding("mooncake wheel", Level.MISSING, problem)
    ((name, version),) = wheels.items()
    return Finding("mooncake wheel", Level.OK, f"{name} {version}")


def _ports(config: Config) -> Iterator[Finding]:
    """Whether `epd serve` can have the ports that the configuration names."""
    from epd.addresses import joined
    from epd.preflight import tried
    from epd.supervisor import fixed_ports

    for (key, host, port), problem in tried(fixed_ports(config)):
        if problem:
            detail = problem.message.removeprefix(f"{key}: ")
            yield Finding(key, Level.MISSING, detail)
        else:
            yield Finding(key, Level.OK, f"{joined(host, port)} is free")


def _memory(config: Config) -> Finding:
    """A lower bound: weights once (stages map the same files), arenas, and the processes."""
    available = _available_mib()
    from epd.supervisor import planned, preloaded_model

    roles = [role.split("+") for role, _ in planned(config.serve)]
    needed, processes = _weights_mib(config.model.path), len(roles) + 1
    if preloaded_model(config) is None:
        needed += processes * _PROCESS_MIB
    else:
        needed += _IMPORTS_MIB + processes * _FORK_MIB
    needed += sum("encode" in stages for stages in roles) * config.encode.arena_mib
    needed += sum("prefill" in stages for stages in roles) * config.prefill.landing_mib
    level = Level.OK if available >= needed else Level.WARNING
    detail = f"{available} MiB available, about {needed} MiB needed beside the KV pools"
    return Finding("memory", level, detail)


def _available_mib() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) >> 10
    return 0


def _weights_mib(path: str) -> int:
    files = Path(path).glob("*.safetensors") if path else ()
    return sum(file.stat().st_size for file in files) // _MIB


def _checkpoint(config: Config) -> Finding:
    from epd.errors import EpdError

    path = config.model.path
    try:
        from epd.models.files import require_config, require_processor
        from epd.models.spec import read_spec

        require_config(path)
        require_processor(path)
        spec = read_spec(path, config.model.dtype)
    except EpdError as error:  # it names the folder, or the file
        return Finding("checkpoint", Level.MISSING, error.message)
    except Exception as error:  # the reason is the finding, whatever its type
        return Finding("checkpoint", Level.MISSING, f"{path}: {type(error).__name__}: {error}")
    size = _weights_mib(path)
    return Finding("checkpoint", Level.OK, f"{path}: {spec.family}, {spec.dtype}, {size} MiB")


def _print(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    colours = {Level.OK: "green", Level.WARNING: "yellow", Level.MISSING: "red"}
    table = Table("what", "state", "detail", box=None, pad_edge=False)
    for finding in findings:
        colour = colours[finding.level]
        # Details hold paths and extras: brackets in them are not for rich.
        state = f"[{colour}]{finding.level}[/]"
        table.add_row(escape(finding.subject), state, escape(finding.detail))
    Console(soft_wrap=not sys.stdout.isatty()).print(table, markup=True)
