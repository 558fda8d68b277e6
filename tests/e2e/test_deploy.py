"""The commands, environments and configurations of deploy/ really serve: four processes in four
network namespaces, with certificates and names, asked through the gateway; then a stage is
scaled and another one rolled, while clients go on asking."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.chaos.questions import questions
from tests.chaos.service import Place
from tests.chaos.traffic import Traffic
from tests.deployed import ROLES, allowed, expressions
from tests.e2e.cluster import MUST_BE_ZERO
from tests.e2e.conftest import COLOUR, picture, user
from tests.e2e.member import request
from tests.e2e.pods import Pod, Pods, launched
from tests.netns import open_network
from tests.waiting import LIMIT_S, block_until, until

STAGES = ROLES[1:]
STAYING = ("whole", "stream", "grpc")
"""Ways of clients that wait for their answer."""
ASKED = [*questions()[:8], *questions()[12:14]]
"""Texts, pictures, several choices, long outputs."""


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    with open_network() as network:
        yield Pods(tmp_path, network)


def ready(pod: Pod) -> bool:
    return request(pod.report["metrics"], "/ready", timeout_s=LIMIT_S).status == 200


def alive(pod: Pod) -> bool:
    return request(pod.report["metrics"], "/health", timeout_s=LIMIT_S).status == 200


def colour(gateway: Pod) -> str:
    body = {"model": "checkpoint", "messages": [user(picture("red_circle.png"), COLOUR)]}
    reply = request(gateway.report["http"], "/v1/chat/completions", body | {"temperature": 0})
    assert reply.status == 200, reply
    return str(reply.json["choices"][0]["message"]["content"])


def end(pods: Sequence[Pod]) -> None:
    """SIGTERM, as kubelet and systemd do, to the process alone; each ends by itself."""
    for pod in pods:
        pod.send(signal.SIGTERM)
    codes = {f"{pod.role}-{pod.index}": pod.finish() for pod in pods}
    assert set(codes.values()) == {0}, codes


def left_over(pods: Sequence[Pod]) -> list[str]:
    return [
        f"{pod.role}-{pod.index}: {key}"
        for pod in pods
        for key in MUST_BE_ZERO[pod.role]
        if pod.debug_state().get(key) != 0
    ]


async def test_kubernetes_serves_scales_and_rolls(pods: Pods) -> None:
    pods.plan({"gateway": 1, "encode": 1, "prefill": 2, "decode": 2})
    gateway, encode, prefill, decode = (pods.in_kubernetes(role) for role in ROLES)
    running = [gateway, encode, prefill, decode]
    try:
        launched([gateway])
        assert alive(gateway)
        assert not ready(gateway), "no stage has a worker"
        await asyncio.to_thread(launched, [encode, prefill, decode])
        for pod in running:
            await asyncio.to_thread(block_until, partial(ready, pod))
        assert "red" in await asyncio.to_thread(colour, gateway)
        traffic = Traffic([Place(gateway, gateway.node)], ASKED, seed=3)
        await traffic.learn()
        clients = asyncio.create_task(traffic.run(2, ways=STAYING, bursts=False))
        # decode from one to two to one; what runs on the one that goes runs to its end.
        await replace(decode, pods, running, traffic)
        # prefill rolls: maxSurge 1, maxUnavailable 0.
        await replace(prefill, pods, running, traffic)
        traffic.stop()
        await clients
        wrong = [outcome for outcome in traffic.outcomes.all if outcome.kind != "right"]
        assert not wrong
        dialled = await asyncio.to_thread(pods.dialled)
        assert dialled - allowed() == set(), "the network policies would forbid it"
        assert {who for who, _, port in dialled if port >= 15000} == {"prefill", "decode"}
        await until(lambda: not left_over(running))
        assert not missing_series(running)
        await asyncio.to_thread(end, running)
    finally:
        kill(running)


async def replace(leaving: Pod, pods: Pods, running: list[Pod], traffic: Traffic) -> None:
    """Start one more of its role; once Kubernetes would take that for ready, and something was
    answered, this one leaves, and more is answered. `running` is kept true."""
    more = pods.in_kubernetes(leaving.role)
    running.append(more)
    await asyncio.to_thread(launched, [more])
    await asyncio.to_thread(block_until, lambda: ready(more))
    await another(traffic)
    await asyncio.to_thread(end, [leaving])
    running.remove(leaving)
    await another(traffic)


async def another(traffic: Traffic) -> None:
    before = len(traffic.outcomes.all)
    await until(lambda: len(traffic.outcomes.all) > before + 1)


def missing_series(pods: Sequence[Pod]) -> set[str]:
    """What autoscalers and alerts ask for of `epd_state`, and no process has."""
    pages = "".join(pod.metrics() for pod in pods)
    there = set(re.findall(r'^epd_state\{stage="\w+",what="(\w+)"\}', pages, re.MULTILINE))
    asked = " ".join(expression for _, expression in expressions())
    named = re.findall(r'what="(\w+)"', asked)
    (soon,) = re.findall(r'^epd_certificate_\w+\{use="authority"\} (\S+)', pods[0].metrics(), re.M)
    assert float(soon) > 0
    assert named
    return set(named) - there


async def test_systemd_serves(pods: Pods, tmp_path: Path) -> None:
    pods.plan(dict.fromkeys(ROLES, 1))
    started = [pods.in_systemd(role) for role in ROLES]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.settimeout(LIMIT_S)
            systemd.bind(str(tmp_path / "notify"))
            for pod in started:
                pod.environ["NOTIFY_SOCKET"] = str(tmp_path / "notify")
            await asyncio.to_thread(launched, started)
            assert [systemd.recv(100) for _ in started] == [b"READY=1"] * len(started)
        await asyncio.to_thread(block_until, lambda: all(map(ready, started)))
        assert "red" in await asyncio.to_thread(colour, started[0])
        await until(lambda: not left_over(started))
        await asyncio.to_thread(end, started)
    finally:
        kill(started)


def kill(pods: Sequence[Pod]) -> None:
    """After a failure: nothing may outlive the test."""
    for pod in pods:
        if pod.alive:
            pod.end(signal.SIGKILL)
