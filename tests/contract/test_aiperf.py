"""A load client that nobody here wrote finishes its run: aiperf, with pictures, streamed.

It lives in a virtual environment of its own (`make load-client` makes it, or name the program
in AIPERF); where it is not there, this is skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import DEMO_CHECKPOINT, ROOT, Cluster

pytestmark = pytest.mark.timeout(400)
REQUESTS = 24
_OWN = ROOT / ".venv-aiperf" / "bin" / "aiperf"
PROGRAM = os.environ.get("AIPERF") or (str(_OWN) if _OWN.exists() else shutil.which("aiperf"))
needs_aiperf = pytest.mark.skipif(
    PROGRAM is None, reason="aiperf is not here: make load-client installs it and runs this"
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("aiperf"))
    try:
        yield cluster.start()
        cluster.assert_clean()
    finally:
        cluster.close()


@needs_aiperf
@pytest.mark.parametrize("images", [True, False])
def test_aiperf_finishes_a_run(cluster: Cluster, images: bool, tmp_path: Path) -> None:
    pictures = ["--image-width-mean", "64", "--image-height-mean", "48"] if images else []
    command = [
        *(str(PROGRAM), "profile", "--model", cluster.model, "--url", f"http://{cluster.address}"),
        *("--endpoint-type", "chat", "--streaming", "--tokenizer", str(DEMO_CHECKPOINT)),
        *("--isl", "24", "--osl", "16", "--extra-inputs", "ignore_eos:true"),
        *("--use-server-token-count", "--request-count", str(REQUESTS), "--concurrency", "4"),
        *("--ui", "none", "--artifact-dir", str(tmp_path), *pictures),
    ]
    # Offline, it takes the path of a tokenizer for a name on the Hub.
    ours = ("PYTHONPATH", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    environ = {key: value for key, value in os.environ.items() if key not in ours}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environ)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report: dict[str, Any] = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == REQUESTS
    assert "error_request_count" not in report or not report["error_request_count"]["avg"]
    assert report["output_sequence_length"]["min"] == 16
    shown = ("time_to_first_token", "inter_token_latency", "request_throughput")
    for name in shown:
        assert report[name]["avg"] > 0
        print(f"aiperf {name}: {report[name]['avg']:.2f} {report[name]['unit']}")
