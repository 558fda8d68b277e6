"""Fixtures that several kinds of tests share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

if not os.path.exists("/dev/nvidia0"):
    # Before anything imports Triton: its kernels are run by its interpreter, on the CPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tests' own gRPC channels lead to servers of this machine. (epd's never ask a proxy.)
os.environ.setdefault("no_grpc_proxy", "127.0.0.1,localhost,::1")

# Speed is no property: no example may fail for being slow. By default the examples are the
# same in every run, so that a build fails for what has changed; `--hypothesis-profile=explore`
# (make test-long) draws new ones.
settings.register_profile(
    "steady",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", parent=settings.get_profile("steady"), derandomize=False)
settings.load_profile("steady")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """With `--reruns`: why a test needed another try, or nobody would look for the cause."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"FAILED AT FIRST: {report.nodeid}", sep="!")
        terminalreporter.write_line(report.longreprtext)


TinyCheckpoint = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """``tiny_checkpoint(family, dtype="float32", seed=0)``: folder, built once a session."""
    built: dict[tuple[str, str, int], Path] = {}

    def get(family: str, dtype: str = "float32", seed: int = 0) -> Path:
        from tests.tiny import build

        key = (family, dtype, seed)
        if key not in built:
            folder = tmp_path_factory.mktemp("checkpoints") / f"{family}-{dtype}-{seed}"
            built[key] = build(family, folder, dtype, seed)
        return built[key]

    return get
