"""schemathesis: what the OpenAPI document describes, and what it doesn't, gets no 5xx.

Not part of the dev extra (it brings a lot along): ``make contract`` installs it.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.e2e.gateway_house import House

pytest.importorskip("schemathesis")


async def test_every_described_request_has_a_described_answer(house: House, tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "schemathesis.cli", "run", f"http://{house.http}/openapi.json",
        "--checks", "not_a_server_error,status_code_conformance,content_type_conformance,"
        "response_schema_conformance",
        "--max-examples", "20", "--phases", "examples,coverage,fuzzing", "--seed", "1",
        "--generation-deterministic", "--request-timeout", "20", "--no-color",
        cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-6000:]
    await house.settled()
