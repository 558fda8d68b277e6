"""`bench.gateway.overhead` works: a real gateway, scripted stages, figures of both kinds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


# Streams enough for the clock of a process's time, which counts hundredths of a second.
_SMALL = """
from bench.gateway import overhead
overhead.TOKENS, overhead.STREAMS, overhead._LEAST_REQUESTS, overhead._IDLE_S = 4, (1, 2), 16, 0.2
overhead.main()
"""


def test_all_of_it_with_few_requests_and_a_core_for_the_gateway(tmp_path: Path) -> None:
    """Whether it works, not what it finds: the figures want the full size, below."""
    out, cores = tmp_path / "overhead.json", sorted(os.sched_getaffinity(0))
    pin = ["--pin"] if len(cores) > 1 else []
    command = [sys.executable, "-c", _SMALL, "--requests", "2", *pin, "--json", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, check=True, timeout=230, capture_output=True, text=True
    )
    found = json.loads(out.read_text())
    assert [len(arms["total"]) for arms in found["ttft_s"].values()] == [1, 1, 1]
    assert all(found["cpu_s_per_token"][streams] > 0 for streams in ("1", "2"))
    assert done.stdout.count("added by the gateway") == 3
    if pin:
        assert found["cores"] == {"gateway": cores[:1], "others": cores[1:]}


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
