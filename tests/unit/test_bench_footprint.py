"""Memory of a service, as `bench.measure` tells it: every process, and what a stage holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from bench.footprint import Own, memory
from bench.service import Service

MIB = 1 << 20
SLEEP = "import sys, time; print('up', flush=True); time.sleep(60)"


@pytest.mark.parametrize(
    ("state", "weights", "pools"),
    [
        ({"weights_bytes": 5, "arena_bytes": 7}, 5, 7),
        ({"weights_bytes": 9, "kv_blocks": 4, "kv_block_bytes": 10, "arena_bytes": 7}, 9, 47),
        # One process: prefill and decode share the weights and the pool.
        (
            {
                "stages": {
                    "encode": {"weights_bytes": 5, "arena_bytes": 7},
                    "prefill": {
                        "weights_bytes": 9, "kv_blocks": 4, "kv_block_bytes": 10,
                        "arena_bytes": 2,
                    },
                    "decode": {"weights_bytes": 9, "kv_blocks": 4, "kv_block_bytes": 10},
                }
            },
            14,
            49,
        ),
    ],
    ids=["encode", "prefill", "all in one"],
)  # fmt: skip
def test_what_a_stage_holds(state: dict[str, object], weights: int, pools: int) -> None:
    assert Own.of(state) == Own(weights, pools)


@pytest.fixture
def family() -> Iterator[subprocess.Popen[str]]:
    """A process that has a helper, with a task as the sandbox writes it."""
    task = json.dumps({"entry": "encode.decoder:load", "arguments": {}})
    helper = f"subprocess.Popen([sys.executable, '-c', {SLEEP!r}, {task!r}])"
    code = f"import subprocess, sys; child = {helper}; child.wait()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, process_group=0
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    yield process
    os.killpg(process.pid, 9)
    process.wait()


def test_helpers_have_a_row_of_their_own(family: subprocess.Popen[str]) -> None:
    service = Service("", "m", os.getpid(), {"encode-0": family.pid})
    # An ended child that nobody has collected yet is no row, and no trouble.
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    rows = [line.split("|")[1].strip() for line in memory(service).splitlines()[2:]]
    ended.wait()
    assert rows[0] == "epd serve"
    assert rows[-2:] == ["encode-0", "encode-0: encode.decoder"]
    assert rows.count("encode-0: encode.decoder") == 1
    cells = memory(service).splitlines()[-1].split("|")
    rss = psutil.Process(family.pid).children()[0].memory_info().rss
    assert abs(int(cells[4]) - rss / MIB) <= 1
