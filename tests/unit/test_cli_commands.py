"""The command line: what it accepts, what it says when it can't, what it never imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from epd import __version__, host
from epd.cli import app
from epd.config import Config

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = str(ROOT / "demo" / "checkpoint")
HEAVY = {"torch", "transformers", "mooncake", "tokenizers", "numpy", "PIL", "fastapi"}


def epd(*arguments: str, module: str = "epd.cli") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["chat", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    program = (
        "import json, sys\n"
        "from epd.cli import app\n"
        "try: app(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print(json.dumps([name.partition('.')[0] for name in sys.modules]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Usage" in done.stdout
    assert not HEAVY & set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("module", ["epd.config", "epd.errors", "epd.jobs", "epd.supervisor"])
def test_light_modules_stay_light(module: str) -> None:
    program = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert not HEAVY & {name.partition(".")[0] for name in done.stdout.split()}


def test_version() -> None:
    assert epd("--version").stdout.strip() == f"epd {__version__}"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["encode"], "which model?"),
        (["encode", "/nowhere"], "/nowhere: not a checkpoint"),
        (["serve", "/nowhere"], "/nowhere: not a checkpoint"),
        (["decode", CHECKPOINT, "--set", "kv.block_tokens=0"], "kv.block_tokens: Input should be"),
        (["decode", CHECKPOINT, "--set", "kv.nothing=1"], "kv.nothing: there is no such key"),
        (["decode", CHECKPOINT, "--set", "kv=1"], "kv: "),
        (["decode", CHECKPOINT, "--set", "kv.block_tokens"], "write KEY=VALUE"),
        (["gateway", CHECKPOINT, "--config", "/nowhere.toml"], "/nowhere.toml"),
    ],
)
def test_a_wrong_call_says_why_in_one_line(arguments: list[str], reason: str) -> None:
    done = epd(*arguments)
    assert done.returncode == 2
    assert reason in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def test_flags_beat_settings_beat_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[tuple[str, Config]] = []

    def run_stage(role: str, config: Config) -> int:
        seen.append((role, config))
        return 7

    monkeypatch.setattr(host, "run_stage", run_stage)
    file = tmp_path / "epd.toml"
    file.write_text("[kv]\nblock_tokens = 8\nprefill_tokens = 128\n[log]\nlevel = 'debug'\n")
    arguments = ["prefill", CHECKPOINT, "--config", str(file), "--set", "kv.block_tokens=16"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 7
    ((role, config),) = seen
    assert role == "prefill"
    assert config.model.path == CHECKPOINT
    assert (config.kv.block_tokens, config.kv.prefill_tokens) == (16, 128)
    assert config.log.level == "debug"


def test_serve_counts_reach_the_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Config] = []

    def run(config: Config) -> int:
        seen.append(config)
        return 0

    monkeypatch.setattr("epd.supervisor.run", run)
    arguments = ["serve", CHECKPOINT, "--encode", "2", "--decode", "3", "--http-port", "0"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    (config,) = seen
    assert (config.serve.encode, config.serve.prefill, config.serve.decode) == (2, 1, 3)
    assert config.gateway.http_port == 0
