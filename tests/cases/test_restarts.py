"""Cases HND-*, OPS-*: processes that stop, leave, die and come back at the same address.

One service that tests hurt and leave whole again. Decode waits 0.8 s before each transfer:
there is time to do something between the end of prefill and the pull.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from epd.child import command_line
from tests.cases.pictures import another, body, file, fresh, noise, text
from tests.cases.test_pressure import Leaver
from tests.e2e.cluster import DEMO_CHECKPOINT, GATEWAY, ROOT, STAGES, Cluster
from tests.e2e.member import Reply, request
from tests.ports import free_ports
from tests.waiting import LIMIT_S, block_until, promised

DELAY_S = 0.8
LIVES = 16
"""Of prefill within a minute, second tries of tests included."""
CHAT = "/v1/chat/completions"
SETTINGS = {
    "transfer.read_deadline_s": 1.5,
    "transfer.quarantine_margin_s": 0.2,
    "worker.grace_s": 60,
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    environ = {"decode": {"EPD_FAULTS": f"transfer.delay={DELAY_S}"}}
    folder = tmp_path_factory.mktemp("mortal")
    cluster = Cluster(folder, settings=SETTINGS, environ=environ)
    # Each comes back at its old address. Of prefill's ports every life takes two, which the
    # kernel keeps for a minute after it.
    http, *ports = free_ports(1 + len(cluster.workers) + 2 * LIVES)
    for worker in cluster.workers:
        worker.settings["worker.port"] = str(ports.pop(0))
    cluster.worker("prefill").settings |= {
        "transfer.port_min": str(ports[0]),
        "transfer.port_max": str(ports[-1]),
    }
    cluster.gateway.settings["gateway.http_port"] = str(http)
    cluster.start()
    yield cluster
    cluster.close()


@pytest.fixture
def mortal(running: Cluster) -> Cluster:
    running.make_whole()
    return running


@pytest.fixture(autouse=True)
def whole(mortal: Cluster) -> Iterator[None]:
    """Nothing is held after a test, and everybody serves."""
    yield
    mortal.until_serving()
    mortal.assert_clean()


def picture() -> bytes:
    """One that no cache has seen, in another try of a test, either."""
    return file(noise(64, 64, another()))


def ask(cluster: Cluster, model: str, *parts: Any, **fields: Any) -> Reply:
    """A question that no cache has seen, unless it says otherwise."""
    asked = body(*parts, text(fresh()), **{"ignore_eos": True, **fields})
    return request(cluster.address, CHAT, {"model": model} | asked, 60)


def started(cluster: Cluster, stage: str) -> None:
    """Wait until the stage has a stream."""
    block_until(lambda: cluster.worker(stage).debug_state()["streams"])


def is_ready(cluster: Cluster) -> bool:
    return request(cluster.address, "/ready", timeout_s=5).status == 200


def events(reply: Reply) -> list[Any]:
    lines = [line.removeprefix(b"data: ") for line in reply.body.split(b"\n\n") if line]
    return [json.loads(line) for line in lines if line[:1] == b"{"]


def ended_whole(reply: Reply, tokens: int) -> None:
    """A stream of so many tokens with its one terminal."""
    assert reply.status == 200, reply.body
    assert reply.body.rstrip().endswith(b"data: [DONE]"), reply.body[-300:]
    found = events(reply)
    assert not any("error" in event for event in found), found[-1]
    assert found[-1]["usage"]["completion_tokens"] == tokens


# -- health -----------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_ops_01_a_stopped_stage_shows_and_comes_back(mortal: Cluster, stage: str) -> None:
    address = mortal.worker(stage).report["address"]
    with mortal.paused(stage):
        block_until(lambda: not is_ready(mortal), promised(8.0))
        assert stage in request(mortal.address, "/ready").body.decode()
        assert request(mortal.address, "/health").status == 200
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError):
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=0.5)
    mortal.until_serving()


def test_hnd_19_a_peer_that_stops_under_a_transfer_gives_no_text(mortal: Cluster) -> None:
    """After the first token, which is prefill's own, there is an error and nothing else."""
    reply = stopped_under_a_transfer(mortal)
    if reply.status == 200:
        found = events(reply)
        words = [e["choices"][0] for e in found if e.get("choices")]
        assert sum(bool(word["delta"].get("content")) for word in words) <= 1, found
        assert not any(word["finish_reason"] for word in words)


def stopped_under_a_transfer(cluster: Cluster, tries: int = 10) -> Reply:
    """To a request whose prefill is stopped while decode waits before its transfer. Where the
    machine let that pass before, the answer is whole, and it is tried again."""
    for _ in range(tries):
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask, cluster, cluster.model, stream=True, max_tokens=20, **USAGE)
            started(cluster, "decode")
            time.sleep(DELAY_S / 8)
            with cluster.paused("prefill"):
                reply = asked.result(LIMIT_S)
        if b'"error"' in reply.body:
            return reply
        ended_whole(reply, 20)
        cluster.until_serving()
    raise AssertionError("prefill was never stopped in time")


# -- leaving and dying --------------------------------------------------------------------


def test_ops_04_hnd_18_prefill_leaves_while_decode_still_has_to_pull(mortal: Cluster) -> None:
    model = mortal.model
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, mortal, model, stream=True, max_tokens=20, **USAGE)
        started(mortal, "decode")
        assert mortal.worker("prefill").end(signal.SIGTERM) == 0
        ended_whole(asked.result(LIMIT_S), 20)
    mortal.restart("prefill")
    for _ in range(3):  # another life at the same address
        assert ask(mortal, model, picture()).status == 200


def test_hnd_09_hnd_17_prefill_dies_under_an_aborted_transfer(mortal: Cluster) -> None:
    """Decode gives back what it holds for a peer that never reports, and when prefill is
    back at its old address the first request works."""
    model = mortal.model
    leaver = Leaver(mortal, body(text("left"), stream=True, max_tokens=50))
    started(mortal, "decode")
    leaver.leave()
    mortal.worker("prefill").end(signal.SIGKILL)
    mortal.assert_clean()
    mortal.restart("prefill")
    reply = ask(mortal, model, picture())
    assert reply.status == 200
    assert reply.seconds < promised(5.0)


USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}


def in_mid_stream(cluster: Cluster, pool: ThreadPoolExecutor, count: int) -> list[Future[Reply]]:
    """So many long streams, of which decode has made tokens."""
    model, before = cluster.model, cluster.worker("decode").debug_state()["steps"]
    long: dict[str, Any] = {"stream": True, "max_tokens": 700, **USAGE}
    asked = [pool.submit(ask, cluster, model, **long) for _ in range(count)]
    block_until(lambda: cluster.worker("decode").debug_state()["steps"] >= before + 20)
    return asked


def test_ops_03_decode_leaves_and_breaks_no_stream(mortal: Cluster) -> None:
    model = mortal.model
    with ThreadPoolExecutor(4) as pool:
        asked = in_mid_stream(mortal, pool, 4)
        mortal.worker("decode").send(signal.SIGTERM)
        block_until(lambda: not is_ready(mortal))
        refused = ask(mortal, model, max_tokens=8)
        assert (refused.status, refused.error["code"]) == (503, "stage_unavailable")
        assert int(refused.headers["retry-after"]) >= 1
        for reply in [future.result(LIMIT_S) for future in asked]:
            ended_whole(reply, 700)
    process = mortal.worker("decode").process
    assert process is not None
    assert process.wait(LIMIT_S) == 0
    mortal.restart("decode")
    assert ask(mortal, model).status == 200


def test_ops_03_ops_06_without_encoders_text_is_served(mortal: Cluster) -> None:
    """The last encoder leaves while it works; pictures are 503 until another is there."""
    model = mortal.model
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, mortal, model, picture()) for _ in range(4)]
        started(mortal, "encode")
        assert mortal.worker("encode").end(signal.SIGTERM) == 0
        assert {future.result().status for future in asked} <= {200, 503}
    assert ask(mortal, model).status == 200
    shown = picture()
    refused = ask(mortal, model, shown)
    assert (refused.status, refused.error["code"]) == (503, "stage_unavailable")
    assert int(refused.headers["retry-after"]) >= 1
    assert request(mortal.address, "/v1/models").json["data"][0]["id"] == model
    gateway = mortal.gateway.pid
    mortal.restart("encode")
    assert ask(mortal, model, shown).status == 200
    assert mortal.gateway.pid == gateway


def test_ops_03_hnd_17_the_gateway_leaves_and_comes_back(mortal: Cluster) -> None:
    """Its streams end whole; then the workers, all the same, find it again."""
    workers = [worker.pid for worker in mortal.workers]
    with ThreadPoolExecutor(3) as pool:
        asked = in_mid_stream(mortal, pool, 3)
        mortal.gateway.send(signal.SIGTERM)
        for reply in [future.result(LIMIT_S) for future in asked]:
            ended_whole(reply, 700)
    process = mortal.gateway.process
    assert process is not None
    assert process.wait(LIMIT_S) == 0
    mortal.restart(GATEWAY)
    reply = ask(mortal, mortal.model, picture())
    assert reply.status == 200
    assert reply.seconds < promised(5.0)
    assert [worker.pid for worker in mortal.workers] == workers


def handles_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


HEARD = """
import signal, sys, epd.host, epd.cli

def serve_stage(role, config):
    heard = signal.getsignal(signal.SIGTERM) is epd.host._on_early_stop
    print(role, heard, "torch" in sys.modules, flush=True)
    return 0

epd.host.serve_stage = serve_stage
epd.cli.main()
"""


@pytest.mark.parametrize("role", [GATEWAY, *STAGES])
def test_ops_05_a_stop_is_heard_before_anything_is_loaded(role: str) -> None:
    """Whatever then takes how long."""
    command = [sys.executable, "-c", HEARD, role, str(DEMO_CHECKPOINT)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout.split() == [role, "True", "False"], done.stderr


@pytest.mark.parametrize("role", [GATEWAY, "encode", "decode"])
def test_ops_05_told_to_stop_while_it_starts(role: str) -> None:
    """At three moments; the one before there is a handler belongs to Python."""
    ports = {f"gateway.{port}": "0" for port in ("http_port", "grpc_port", "membership_port")}
    settings = {"model.path": str(DEMO_CHECKPOINT)} | (ports if role == GATEWAY else {})
    made = [
        subprocess.Popen(
            command_line(role, settings), cwd=ROOT, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        for _ in range(3)
    ]  # fmt: skip
    for after_s, process in zip((0.0, 0.4, 1.2), made, strict=True):
        block_until(partial(handles_sigterm, process.pid))
        time.sleep(after_s)
        process.send_signal(signal.SIGTERM)
    assert [process.wait(LIMIT_S) for process in made] == [0, 0, 0]
