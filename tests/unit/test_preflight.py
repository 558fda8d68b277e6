"""What can't work is known before anything is loaded, and is named."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from epd import preflight
from epd.child import child_environment
from epd.config import Config
from epd.config_sources import load_config
from epd.errors import EpdError
from epd.models.families import PROVEN
from epd.models.files import CHECKED
from epd.supervisor import fixed_ports, run
from tests.waiting import promised

DEMO = Path(__file__).parents[2] / "demo" / "checkpoint"
PORTS = ("gateway.http_port", "gateway.grpc_port", "gateway.membership_port",
         "gateway.metrics_port", "worker.port", "worker.metrics_port")  # fmt: skip


def settings(**flags: Any) -> Config:
    free = dict.fromkeys(PORTS, 0)
    return load_config(None, free | {"model.path": str(DEMO)} | flags, {})


def checked(path: Path) -> None:
    preflight.check(settings(**{"model.path": str(path)}), (), gateway=True, worker=True)


def test_a_tokenizer_is_read_by_whoever_starts_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those inherit its word. It holds for that file as it was; who is started alone reads it."""
    read: list[str] = []

    class Counted:
        @staticmethod
        def from_file(path: str) -> None:
            read.append(path)
            Tokenizer.from_file(path)

    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer.json"
    monkeypatch.setenv(CHECKED, "")
    monkeypatch.setattr("tokenizers.Tokenizer", Counted)
    checked(tmp_path)
    checked(tmp_path)
    assert read == [str(file)]
    inherited = child_environment(settings(), os.environ)[CHECKED]
    monkeypatch.delenv(CHECKED)
    checked(tmp_path)
    assert len(read) == 2, "it was started alone"
    monkeypatch.setenv(CHECKED, inherited)
    checked(tmp_path)
    assert len(read) == 2
    file.write_bytes(file.read_bytes().replace(b"vocab", b"vocaB"))
    with pytest.raises(EpdError, match="it has no vocabulary"):
        checked(tmp_path)
    shutil.copy(DEMO / "tokenizer.json", tmp_path / "other.json")
    (tmp_path / "other.json").replace(file)
    checked(tmp_path)
    assert len(read) == 3, "another file"


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def refusal(config: Config, capsys: pytest.CaptureFixture[str]) -> str:
    """What `epd serve` says instead of starting."""
    assert run(config) == 1
    captured = capsys.readouterr()
    assert captured.out == ""  # no process was started
    (line,) = captured.err.splitlines()
    return line.removeprefix("epd serve: can't start: ")


@pytest.mark.parametrize("key", PORTS)
def test_a_taken_port(taken: int, capsys: pytest.CaptureFixture[str], key: str) -> None:
    said = refusal(settings(**{key: taken}), capsys)
    assert said.startswith(f"{key}: 127.0.0.1:{taken}: Address already in use")


@pytest.mark.parametrize("key", ["worker.port", "worker.metrics_port"])
def test_more_workers_than_there_are_ports_behind_the_configured_one(
    capsys: pytest.CaptureFixture[str], key: str
) -> None:
    said = refusal(settings(**{key: 65535}), capsys)
    assert said.startswith(f"{key}: 65536 is no port")


def test_a_file_for_turns_that_cant_be_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(settings(**{"worker.turns_file": str(tmp_path)}), capsys)
    assert said == f"worker.turns_file: {tmp_path}: Is a directory"


def test_two_keys_with_one_port(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    both = {"gateway.http_port": port, "gateway.metrics_port": port}
    assert refusal(settings(**both), capsys).startswith(f"gateway.metrics_port: 127.0.0.1:{port}")


def test_free_ports_are_free_again_afterwards() -> None:
    config = settings()
    for _ in range(2):
        preflight.check(config, fixed_ports(config), gateway=True, worker=True)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_checkpoint_without_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    for name in {"model.safetensors", "config.json"} - {file}:
        (tmp_path / name).write_bytes((DEMO / name).read_bytes())
    said = refusal(settings(**{"model.path": str(tmp_path)}), capsys)
    assert said.startswith(f"{tmp_path / file}: ")


def test_a_checkpoint_that_was_cut_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_bytes((DEMO / "config.json").read_bytes())
    whole = (DEMO / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    said = refusal(settings(**{"model.path": str(tmp_path)}), capsys)
    assert said.startswith(f"{tmp_path / 'model.safetensors'}: this weights file is cut off")


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
BROKEN: list[tuple[str, bytes | None, str]] = [
    ("config.json", b"{", "is no JSON: "),
    ("config.json", b"[]", "must be a JSON object"),
    ("config.json", b"", "is empty"),
    ("config.json", b"{}", "has no model_type"),
    ("config.json", b'{"model_type": "gpt9"}', "models of the family 'gpt9' can't be served: "),
    ("config.json", b'{"model_type": "gemma3"}', "its image tokens attend in both directions"),
    ("tokenizer.json", None, "is missing; there is no tokenizer"),
    ("tokenizer.json", b'{"model": {"vo', "is no JSON: "),
    ("tokenizer.json", b'{"model": {"vocab": {}}}', "is no tokenizer: it has no vocabulary"),
    ("tokenizer.json", b'{"model": {"vocab": {"a": "b"}}}', "is no tokenizer that can be read"),
    ("tokenizer.json", LFS, "a git-lfs pointer, not the file: run 'git lfs pull'"),
    ("tokenizer.json", b"\xff\xfe", "is no JSON: "),
    ("tokenizer_config.json", None, "is missing; it says which special tokens"),
    ("tokenizer_config.json", b"nothing", "is no JSON: "),
    ("preprocessor_config.json", None, "is missing; it says how pictures are prepared"),
    ("preprocessor_config.json", b"7", "must be a JSON object"),
    ("processor_config.json", b"[" * 100_000, "is no JSON: "),
    ("generation_config.json", b"{", "is no JSON: "),
    ("chat_template.jinja", None, "holds no chat template, and there is none elsewhere"),
    ("chat_template.jinja", b" \n", "holds no chat template"),
    ("chat_template.jinja", b"{% for m in messages %}", "the chat template can't be read: line 1"),
    ("chat_template.jinja", b"\xff\xfe", "can't be read: "),
    ("chat_template.json", b'{"chat_template": "{{ x"}', ""),
]


@pytest.mark.parametrize(("file", "content", "words"), BROKEN)
def test_a_small_file_that_is_missing_or_broken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, content: bytes | None, words: str
) -> None:
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    (tmp_path / file).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / file).write_bytes(content)
    if not words:  # the template beside it is taken
        preflight.check(settings(**{"model.path": str(tmp_path)}), (), gateway=True, worker=True)
        return
    began = time.perf_counter()
    said = refusal(settings(**{"model.path": str(tmp_path)}), capsys)
    assert time.perf_counter() - began < promised(1)
    assert said.startswith(f"{tmp_path / file}: ")
    assert words in said


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("chat_template.json", {"chat_template": "{{ messages }}"}),
        ("processor_config.json", {"chat_template": "{{ messages }}"}),
        ("tokenizer_config.json", {"chat_template": "{% generation %}a{% endgeneration %}"}),
        (
            "tokenizer_config.json",
            {"chat_template": [{"name": "default", "template": "{% break %}".join(
                ("{% for m in messages %}", "{% endfor %}"))}]},
        ),
    ],
)  # fmt: skip
def test_templates_in_all_their_places(tmp_path: Path, file: str, content: Any) -> None:
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    known = json.loads((tmp_path / file).read_text()) if (tmp_path / file).exists() else {}
    (tmp_path / file).write_text(json.dumps(known | content))
    preflight.check(settings(**{"model.path": str(tmp_path)}), (), gateway=True, worker=True)


def test_a_processor_in_one_file(tmp_path: Path) -> None:
    """As newer releases of transformers write it."""
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    pictures = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": pictures}))
    preflight.check(settings(**{"model.path": str(tmp_path)}), (), gateway=True, worker=True)


@pytest.mark.parametrize("family", sorted(PROVEN))
def test_all_families_pass(tiny_checkpoint: Callable[[str], Path], family: str) -> None:
    config = settings(**{"model.path": str(tiny_checkpoint(family))})
    preflight.check(config, (), gateway=True, worker=True)


@pytest.mark.parametrize("wheels", [{}, {"mooncake-transfer-engine": "1", "other": "1"}])
def test_no_build_of_mooncake_or_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wheels: dict[str, str]
) -> None:
    monkeypatch.setattr("epd.wheel.installed_wheels", lambda: wheels)
    assert "pip install 'epd[" in refusal(settings(), capsys)


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ({"transfer.host": "192.0.2.1"}, "transfer.host"),
        ({"transfer.networks": "10.0.0.0/33"}, "transfer.networks"),
        ({"transfer.networks": "fd00::/8"}, "transfer.networks"),
        ({"worker.host": "0.0.0.0"}, "worker.host"),
        ({"gateway.membership_host": "0.0.0.0"}, "gateway.membership_host"),
        ({"rpc.tls_cert": "/no/cert.pem"}, "rpc.tls_key"),
        (
            {"rpc.tls_cert": "/no/c.pem", "rpc.tls_key": "/no/k.pem", "rpc.tls_ca": "/no/ca.pem"},
            "rpc.tls_cert",
        ),
    ],
)
def test_addresses_and_certificates(
    capsys: pytest.CaptureFixture[str], flags: dict[str, Any], key: str
) -> None:
    assert refusal(settings(**flags), capsys).startswith(f"{key}: ")


@pytest.mark.parametrize("role", ["gateway", "encode", "decode"])
def test_one_process_alone_looks_first_as_well(taken: int, role: str) -> None:
    key = "gateway.grpc_port" if role == "gateway" else "worker.port"
    ports = [part for name in PORTS for part in ("--set", f"{name}={taken * (name == key)}")]
    command = [sys.executable, "-X", "importtime", "-m", "epd.cli", role, str(DEMO), *ports]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"epd {role}: {key}: 127.0.0.1:{taken}: Address already in use")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not {"torch", "transformers", "mooncake.engine"} & imported


def test_all_is_well_here() -> None:
    config = settings()
    try:
        preflight.check(config, fixed_ports(config), gateway=True, worker=True)
    except EpdError as error:
        pytest.fail(error.message)
