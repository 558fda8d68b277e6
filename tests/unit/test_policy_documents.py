"""Documents name what exists: files, functions, commands, settings, sections of each other."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from epd.cli import app
from epd.config import Config
from tests.tracked import ROOT, tracked

DOCUMENTS = tracked("*.md")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def test_make_targets_named_in_the_docs_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))
    documents = [*DOCUMENTS, ROOT / ".ci" / "run"]
    named = {
        (target, path.name)
        for path in documents
        for target in re.findall(r"(?:^|`|step )make ([a-z0-9-]+)", path.read_text(), re.MULTILINE)
    }
    assert named, "no document names a make target"
    assert not {(target, name) for target, name in named if target not in targets}


def _command(words: list[str]) -> Any:
    """The command of `epd` that these words begin with; None: there is none."""
    command: Any = get_command(app)
    for word in words:
        commands = getattr(command, "commands", None)
        if commands is None or word.startswith("-"):
            break
        command = commands.get(word)
    return command


def test_commands_and_flags_in_the_documents_exist() -> None:
    seen = 0
    for path in DOCUMENTS:
        text = path.read_text().replace("\\\n", " ")
        for line in re.findall(r"^(?:\$ |EPD_\w+=\S+ )?epd (\S.*)", text, re.MULTILINE):
            words = line.partition("  #")[0].split()
            command = _command(words)
            assert command is not None, f"{path.name}: epd {line}"
            given = [(*each.opts, *each.secondary_opts) for each in command.params]
            known = {"--help", *(name for names in given for name in names)}
            flags = {word.strip("[]") for word in words if word.strip("[").startswith("--")}
            assert flags <= known, f"{path.name}: epd {line}: {flags - known}"
            seen += 1
    assert seen > 10


class _Parsed(Exception):
    """The arguments of a script were taken; nothing of it may run."""


_SCRIPT = re.compile(r"python -m (bench\.[a-z_.]*[a-z_])(.*)")


def _scripts(text: str) -> list[tuple[str, str]]:
    """(module, arguments) of the scripts in `bench` that a text tells people to run: as code,
    as lines, as a docstring's usage, which goes on in lines that begin with a bracket."""
    joined = re.sub(r"\\\n|\n +(?=\[)", " ", text)
    return [
        (name, re.split(r"`|#| \| ", rest)[0].strip()) for name, rest in _SCRIPT.findall(joined)
    ]


def _arguments(written: str) -> list[str]:
    """As they could be typed: what is optional is given, what is left out (...) is left out."""
    plain = re.sub(r"--[\w-]+ \.\.\.", "", written).replace(",...,", ",").replace("...", "")
    return shlex.split(re.sub(r"[\[\]]", " ", plain))


USAGES = [*DOCUMENTS, ROOT / "Makefile", *tracked("bench/*.py")]


@pytest.mark.parametrize("path", USAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_scripts_of_bench_take_the_arguments_that_are_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = argparse.ArgumentParser.parse_args
    check_value: Any = argparse.ArgumentParser._check_value

    def parse_only(parser: argparse.ArgumentParser) -> None:
        parse(parser)
        raise _Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)

    def check(parser: argparse.ArgumentParser, action: argparse.Action, value: object) -> None:
        if not str(value).isupper():  # SCENARIO stands for one of them
            check_value(parser, action, value)

    monkeypatch.setattr(argparse.ArgumentParser, "_check_value", check)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    for name, written in _scripts(path.read_text()):
        script = importlib.import_module(name)
        if not hasattr(script, "argparse"):  # takes words as they come, or none
            continue
        monkeypatch.setattr("sys.argv", [name, *_arguments(written)])
        try:
            script.main()
        except _Parsed:
            continue
        except SystemExit:
            pytest.fail(f"{path.name}: python -m {name} {written}: no such arguments")


def test_scripts_of_bench_are_found_in_texts() -> None:
    told = "`python -m bench.a` \n    python -m bench.b.c X [--n 1]\n        [--s 1,...,9]  # why\n"
    assert _scripts(told) == [("bench.a", ""), ("bench.b.c", "X [--n 1] [--s 1,...,9]")]
    assert _arguments("X [--s 1,...,9] --vllm ... [--set a=b ...]") == [
        "X",
        "--s",
        "1,9",
        "--set",
        "a=b",
    ]
    assert sum(len(_scripts(path.read_text())) for path in USAGES) > 30


def _keys() -> set[str]:
    tree = Config.model_fields
    sections = {name: type(getattr(Config(), name)).model_fields for name in tree}
    return {f"{section}.{key}" for section, keys in sections.items() for key in keys}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_settings_in_the_documents_exist(path: Path) -> None:
    keys, text = _keys(), path.read_text()
    set_by_flag = re.findall(r"--set (\w+\.\w+)=", text)
    by_environment = [
        f"{a}.{b}".lower() for a, b in re.findall(r"\bEPD_([A-Z]+)__([A-Z_]+)=", text)
    ]
    assert {*set_by_flag, *by_environment} <= keys
    sections = "|".join(Config.model_fields)
    named = set(re.findall(rf"`((?:{sections})\.[a-z_]+)(?: ?= ?[^`]*)?`", text))
    files = {key for key in named if (ROOT / f"{key.replace('.', '/')}.py").is_file()}
    files |= {key for key in named if key.endswith(".cpp")}
    assert named - files - {"rpc.tls_", "gateway.tls_"} <= keys


def _names(tree: ast.Module) -> set[str]:
    """Top-level names of a module, and ``Class.member`` for what classes define."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
            members = [
                n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
            found |= {f"{node.name}.{member.name}" for member in members}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def _references(path: Path) -> list[tuple[str, str]]:
    """(file, name in it or "") of the Python files that a document names."""
    return re.findall(r"`([\w/]+/\w+\.py)(?:::?([\w.]+))?`", path.read_text())


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_code_in_the_documents_exists(path: Path) -> None:
    missing = [
        f"{file}:{name}"
        for file, name in _references(path)
        if not (ROOT / file).is_file()
        or (name and name not in _names(ast.parse((ROOT / file).read_text())))
    ]
    assert not missing


def test_the_architecture_page_leads_to_the_code() -> None:
    assert len(_references(ROOT / "docs" / "architecture.md")) > 50


def test_examples_leave_the_prompt_on_a_line_of_its_own() -> None:
    """What prints an answer in pieces ends its line."""
    pieces = [
        code
        for path in DOCUMENTS
        for code in re.findall(
            r"^```python\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL
        )
        if 'end=""' in code
    ]
    assert pieces
    for code in pieces:
        assert code.rstrip().splitlines()[-1].strip() == "print()", code


def anchors(text: str) -> set[str]:
    """Of a document's headings, as GitHub makes them: a second one of a name gets a number."""
    found: Counter[str] = Counter()
    made = set()
    for heading in re.findall(r"^#+ (.+)$", _FENCE.sub("", text), re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        made.add(f"{slug}-{found[slug]}" if found[slug] else slug)
        found[slug] += 1
    return made


def test_links_between_documents_lead_somewhere() -> None:
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)\s]+)[^)]*\)", _FENCE.sub("", path.read_text())):
            if "://" in target:
                continue
            file, _, anchor = target.partition("#")
            document = path.parent / file if file else path
            assert document.exists(), f"{path.name} -> {target}"
            if anchor:
                assert anchor in anchors(document.read_text()), f"{path.name} -> {target}"


def test_anchors_are_those_of_the_headings() -> None:
    text = "# One\n## Two: `a`, b\n## Two: `a`, b\n```\n# no heading\n```\n## [ADR](x.md) 1\n"
    assert anchors(text) == {"one", "two-a-b", "two-a-b-1", "adr-1"}
