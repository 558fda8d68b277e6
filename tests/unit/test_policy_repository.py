"""Policies that a reviewer would otherwise have to remember."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.tracked import ROOT, tracked

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
STAGES = ("encode", "prefill", "decode", "gateway")


def test_import_contracts_hold() -> None:
    # In a process of its own: import-linter switches off loggers that exist already.
    program = "import sys, importlinter.cli as c; sys.exit(c.lint_imports(no_cache=True))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_stubs_are_what_the_protos_give() -> None:
    command = [sys.executable, "-m", "deploy.protos", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_changed_proto_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deploy import protos

    copy = tmp_path / "copy"
    (copy / protos.FOLDER).mkdir(parents=True)
    for path in (ROOT / protos.FOLDER).iterdir():
        if path.is_file():
            (copy / protos.FOLDER / path.name).write_bytes(path.read_bytes())
    source = copy / protos.FOLDER / "encode.proto"
    source.write_text(source.read_text() + "\nmessage Forgotten { uint32 field = 1; }\n")
    monkeypatch.setattr(protos, "ROOT", copy)
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    assert str(protos.FOLDER / "encode_pb2.py") in protos.stale(fresh)


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize(
    ("now", "complaint"),
    [
        ("uint32 lid = 1; uint32 depth = 2; uint32 width = 3;", ""),
        ('uint32 lid = 1; reserved 2; reserved "depth";', ""),
        ("uint32 lid = 1; reserved 2;", 'without reserving the name "depth"'),
        ('uint32 lid = 1; reserved "depth";', 'without reserving the number "2"'),
        ("uint32 lid = 1; uint64 depth = 2;", 'changed type from "uint32" to "uint64"'),
        ("uint32 lid = 1; uint32 height = 2;", 'changed name from "depth" to "height"'),
    ],
)
def test_a_change_that_breaks_old_peers_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: str, complaint: str, committed: bool
) -> None:
    from deploy import protos

    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", *who, *arguments], cwd=copy, check=True, capture_output=True)

    def commit() -> None:
        git("add", ".")
        git("commit", "-m", "a change", "--allow-empty")

    def write(fields: str) -> None:
        source.write_text(f'syntax = "proto3";\npackage epd.v1;\nmessage Box {{ {fields} }}\n')

    copy = tmp_path / "copy"
    source = copy / protos.FOLDER / "box.proto"
    source.parent.mkdir(parents=True)
    shutil.copy(ROOT / "buf.yaml", copy)
    monkeypatch.setattr(protos, "ROOT", copy)
    git("init")
    write("uint32 lid = 1; uint32 depth = 2;")
    commit()
    assert protos.before() is None
    write(now)
    if committed:
        commit()
        (copy / "other").touch()
        commit()  # one that says nothing of protos
    revision = protos.before()
    assert revision is not None
    said = protos.breaks(revision, tmp_path)
    assert complaint in said if complaint else not said


def test_every_proto_field_and_message_can_be_read_by_the_stages() -> None:
    """The package in the file is the one in the folder, so generated imports need no patch."""
    for path in (ROOT / "protos/epd/v1").glob("*.proto"):
        assert "package epd.v1;" in path.read_text(), path


def test_the_wheel_holds_the_service_and_nothing_else(tmp_path: Path) -> None:
    """Built from a copy of what is tracked, offline, by the backend that pip would call."""
    pytest.importorskip("setuptools.build_meta")
    source = tmp_path / "source"
    for path in tracked("*"):
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    program = "import sys; from setuptools import build_meta as b; b.build_wheel(sys.argv[1])"
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("epd-*-py3-none-any.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    shipped = (".py", ".pyi", ".proto", ".cpp", ".h", "/py.typed")
    wanted = {
        str(path.relative_to(ROOT))
        for package in ("epd", "protos", *STAGES)
        for path in tracked(f"{package}/**")
        if str(path).endswith(shipped)
    }
    assert held == wanted, f"not there: {wanted - held}; too much: {held - wanted}"
    assert {name.partition("/")[0] for name in held} == {"epd", "protos", *STAGES}
    assert {Path(name).suffix for name in held} >= {".py", ".pyi", ".proto", ".cpp", ".h"}


@pytest.mark.parametrize("package", ["epd", "protos", *STAGES])
def test_packages_say_that_they_are_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


def test_the_mooncake_builds_exclude_each_other() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    mooncake = {name for name, wanted in extras.items() if "mooncake" in " ".join(wanted)}
    (conflict,) = PROJECT["tool"]["uv"]["conflicts"]
    assert {entry["extra"] for entry in conflict} == mooncake == {"cpu", "cuda", "cuda13"}
    assert not any("mooncake" in wanted for wanted in PROJECT["project"]["dependencies"])
    assert "torchvision" not in (ROOT / "constraints.txt").read_text()


def test_constraints_lie_within_the_ranges() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.lower().replace("_", "-").split("==") for line in lines if "==" in line)
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *extras["cpu"], *extras["dev"]]
    for requirement in map(Requirement, wanted):
        version = pinned[requirement.name.lower().replace("_", "-")]
        assert requirement.specifier.contains(version), f"{requirement} but {version} is pinned"


def _required(extras: set[str]) -> Iterator[str]:
    """Names of all that `pip install .[extras]` brings here, directly or not."""
    wanted = [("epd", frozenset(extras))]
    for package, own in wanted:
        for line in distribution(package).requires or ():
            one = Requirement(line)
            here = not one.marker or any(one.marker.evaluate({"extra": e}) for e in {"", *own})
            if here and (one.name, frozenset(one.extras)) not in wanted:
                wanted.append((one.name, frozenset(one.extras)))
                yield one.name


def test_constraints_name_all_that_is_installed() -> None:
    """Else `make setup` takes versions that the tests were never run with."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line}
    assert {canonicalize_name(name) for name in _required({"cpu", "dev"})} <= pinned


def test_no_path_of_a_builders_machine_is_tracked() -> None:
    banned = re.compile(r"(?<![A-Za-z0-9_.])/(?:work|home/[a-z]+|root)/")
    for pattern in ("*.py", "*.md", "*.toml", "*.yaml", "*.sh", "Makefile", ".ci/run"):
        for path in tracked(pattern):
            if path != Path(__file__).resolve():
                assert not banned.search(path.read_text()), path


def test_no_swallowed_exceptions_and_no_pickle() -> None:
    banned = re.compile(
        r"except (?:Base)?Exception(?: as \w+)?:\s*pass|import pickle|(?<![.\w])eval\("
    )
    for package in ("epd", *STAGES):
        for path in tracked(f"{package}/**.py"):
            found = banned.search(path.read_text())
            assert not found, f"{path}: {found and found[0]}"


DISTRIBUTIONS = {
    "PIL": "pillow",
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "grpc_status": "grpcio-status",
    "prometheus_client": "prometheus-client",
    "starlette": "fastapi",
    "triton": "(an extra)",  # comes with torch's CUDA build
    "tokenizers": "transformers",
    "yarl": "aiohttp",
    "mooncake": "(an extra)",
    "matplotlib": "(an extra)",
}
"""Import name -> distribution that brings it, where they differ."""


def _imported(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return {name.partition(".")[0] for name in found}


def test_what_the_packages_import_is_declared() -> None:
    requirements = map(Requirement, PROJECT["project"]["dependencies"])
    declared = {requirement.name for requirement in requirements} | {"(an extra)"}
    ours = {"epd", "protos", *STAGES, *sys.stdlib_module_names}
    for package in ("epd", *STAGES):
        for path in (ROOT / package).rglob("*.py"):
            for name in _imported(path) - ours:
                distribution = DISTRIBUTIONS.get(name, name)
                assert distribution in declared, f"{path}: {name} is in no dependency"
