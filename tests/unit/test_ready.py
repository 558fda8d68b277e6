"""READY on stdout for whoever reads it, and READY=1 for systemd."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from epd.child import child_environment
from epd.config import Config
from epd.ready import NOTIFY_SOCKET, announce
from tests.waiting import LIMIT_S


@pytest.mark.parametrize("abstract", [False, True], ids=["path", "abstract"])
def test_systemd_is_told(
    abstract: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = f"@epd-{os.getpid()}" if abstract else str(tmp_path / "notify")
    monkeypatch.setenv(NOTIFY_SOCKET, name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.settimeout(LIMIT_S)
        listening.bind(name.replace("@", "\0"))
        announce({"stage": "decode", "pid": 7})
        assert listening.recv(100) == b"READY=1"
    line = capsys.readouterr().out
    assert json.loads(line.removeprefix("READY ")) == {"stage": "decode", "pid": 7}


@pytest.mark.parametrize("name", ["", "/nonexistent/socket"])
def test_nobody_listens(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(NOTIFY_SOCKET, name)
    announce({"stage": "decode"})
    assert capsys.readouterr().out == 'READY {"stage":"decode"}\n'


def test_parts_of_a_service_do_not_speak_for_it() -> None:
    assert NOTIFY_SOCKET not in child_environment(Config(), {NOTIFY_SOCKET: "/run/notify"})
