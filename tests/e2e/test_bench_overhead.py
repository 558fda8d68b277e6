"""`bench.gateway.overhead` works: a real gateway, scripted stages, figures of both kinds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_it_measures_first_tokens_and_streams(tmp_path: Path) -> None:
    out = tmp_path / "overhead.json"
    command = [sys.executable, "-m", "bench.gateway.overhead", "--requests", "2"]
    subprocess.run([*command, "--json", str(out)], cwd=ROOT, check=True, timeout=230)
    found = json.loads(out.read_text())
    assert len(found["ttft_s"]) == 3
    for arms in found["ttft_s"].values():
        for arm in ("total", "client", "stages"):
            assert all(0 < value < 10 for value in arms[arm])
        assert arms["added"] < max(arms["total"])
    assert set(found["cpu_s_per_token"]) == {"1", "64"}
    assert all(0 < value < 0.1 for value in found["cpu_s_per_token"].values())
    assert 0 <= found["idle_cpu"] < 1
