"""Stage processes as `epd serve` starts them: from one fork server, here of the session."""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TextIO

from epd.forkserver import ForkServer, Process

ROOT = Path(__file__).resolve().parents[2]


@cache
def _forks() -> ForkServer:
    server = ForkServer(os.environ, model="", folder=str(ROOT))
    atexit.register(server.close)
    return server


def start(
    command: Sequence[str], environ: Mapping[str, str], stderr: int
) -> tuple[Process, TextIO]:
    """(process, its stdout)"""
    reader, writer = os.pipe()
    try:
        process = _forks().spawn(command, environ, writer, stderr)
    finally:
        os.close(writer)
    return process, open(reader)
