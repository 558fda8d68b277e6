"""One service of real processes for all cases: starting it costs more than most tests.

Tests are named after the case that they prove (`docs/cases.md`). Each ends on the proof
that no block, lease, stream or process was left, or lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cases.site import Site
from tests.e2e.cluster import Cluster
from tests.e2e.gateway_house import empty, house, loaded  # noqa: F401 (fixtures)


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    """A web server on loopback, allow-listed at `cluster`'s gateway."""
    with Site() as site:
        yield site


@pytest.fixture(scope="session")
def running(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    settings = {
        "fetch.mode": "allow-list",
        "fetch.hosts": f"127.0.0.1:{site.port}",
        "fetch.allow_private": True,
        "fetch.total_s": 4,
        "fetch.max_bytes": 1 << 20,
        "encode.decode_cpu_s": 3,
        # Lets a file through that is refused by its header else: the second line holds too.
        "limits.max_image_scans": 1_000_000,
        # Every picture is longer than a step: TOK-02, in every test.
        "prefill.step_tokens": 16,
        "prefill.chunk_tokens": 16,
    }
    cluster = Cluster(tmp_path_factory.mktemp("cases"), settings=settings)
    cluster.start()
    yield cluster
    cluster.close()


@contextmanager
def _crowded(folder: Path, **more: str) -> Iterator[Cluster]:
    """Exact numbers, little memory, slow transfers and steps: what runs waits for what waits,
    on quick machines, too."""
    settings = {
        **more,
        "model.exact": True,
        "kv.block_tokens": 16,
        "kv.prefill_tokens": 640,
        "kv.decode_tokens": 416,
        "prefill.step_tokens": 64,
        "prefill.chunk_tokens": 32,
        "prefill.landing_mib": 1,
        "encode.arena_mib": 1,
        "encode.cache_mib": 1,
        "limits.max_inflight": 48,
        "transfer.read_deadline_s": 2,
        "transfer.quarantine_margin_s": 0.2,
    }
    delay = "transfer.delay=0.03"
    faults = {"prefill": delay, "decode": f"{delay},step.hang=0.001"}
    environ = {stage: {"EPD_FAULTS": spec} for stage, spec in faults.items()}
    cluster = Cluster(folder, settings=settings, environ=environ)
    cluster.start()
    try:
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="session")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with _crowded(tmp_path_factory.mktemp("crowded")) as cluster:
        yield cluster


@pytest.fixture
def by_torch(tmp_path: Path) -> Iterator[Cluster]:
    """The same in single precision, which no kernel of ours computes: there a row's bits are
    its own by what `epd.models.exact` does, and the slightest difference is seen."""
    with _crowded(tmp_path, **{"model.dtype": "float32"}) as cluster:
        yield cluster
        cluster.assert_clean()


@pytest.fixture
def tight(crowded: Cluster) -> Iterator[Cluster]:
    """The crowded service; afterwards nothing may be held, and every process lives on."""
    crowded.make_whole()
    before = crowded.pids
    yield crowded
    crowded.assert_clean()
    assert crowded.pids == before
    assert all(member.alive for member in crowded.members)


@pytest.fixture
def cluster(running: Cluster, site: Site) -> Iterator[Cluster]:
    """The service; a test that costs it a process, or anything that stays, fails."""
    site.reset()
    running.make_whole()
    before = running.pids
    yield running
    running.assert_clean()
    assert running.pids == before
    assert all(member.alive for member in running.members)
