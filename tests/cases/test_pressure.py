"""Cases HND-*, LIF-*, DET-*: many requests at once, with too little memory and slow transfers.

One service in exact mode: whatever runs beside a request, its tokens are those that it has
alone. The fixture shows after each test that all memory is back.
"""

from __future__ import annotations

import json
import random
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from tests.cases.pictures import body, counter, file, noise, solid, text
from tests.e2e.cluster import Cluster
from tests.e2e.member import Reply, request
from tests.waiting import promised, soon

Body = dict[str, Any]
COLD_AND_WARM = (26, 27, 30, 31, 36, 38)
"""Questions that are computed in another way when their first blocks are cached."""
MOST = 350
"""Tokens of an output that nobody waits for."""
STEP_S = 0.5
"""More than any step here takes."""
TRIES = 6
"""To leave in the middle: machines are quick and slow."""


def question(number: int, **fields: Any) -> Body:
    """The number decides words and pictures (none, one or two), all different."""
    chance = random.Random(number)
    files = [
        file(noise(96 + 32 * chance.randrange(3), 96, 7 * number + i)) for i in range(number % 3)
    ]
    words = " ".join(
        chance.choices(["red", "circle", "what", "shape", "two", "is"], k=3 + number % 9)
    )
    return body(*files, text(words), ignore_eos=True, **{"max_tokens": 24, **fields})


def at_once(cluster: Cluster, bodies: Sequence[Body], timeout_s: float = 100.0) -> list[Reply]:
    model = cluster.model
    with ThreadPoolExecutor(len(bodies)) as pool:
        path, made = "/v1/chat/completions", [{"model": model} | one for one in bodies]
        sent = [pool.submit(request, cluster.address, path, one, timeout_s) for one in made]
        return [one.result() for one in sent]


class Leaver:
    """A client that reads what it likes and then goes away."""

    def __init__(self, cluster: Cluster, wanted: Body) -> None:
        host, _, port = cluster.address.partition(":")
        data = json.dumps({"model": cluster.model} | wanted).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(data)}"
        self._socket = socket.create_connection((host, int(port)), timeout=30)
        self._socket.sendall(head.encode() + b"\r\ncontent-type: application/json\r\n\r\n" + data)

    def chunks(self, count: int) -> None:
        """Read until so many events have come."""
        seen = b""
        while seen.count(b"data: ") < count:
            more = self._socket.recv(4096)
            assert more, seen
            seen += more

    def leave(self, half: bool = False) -> None:
        if half:
            self._socket.shutdown(socket.SHUT_WR)
        else:
            self._socket.close()

    def close(self) -> None:
        self._socket.close()


def steps(cluster: Cluster, stage: str) -> int:
    return int(cluster.worker(stage).debug_state()["steps"])


def was_cut_short(cluster: Cluster, before: int) -> bool:
    """Everything is idle within the running step and a second, and decode stays so. False: the
    output had its end before anybody could know that it is unwanted."""
    cluster.assert_clean(promised(STEP_S + 1.0))
    after = steps(cluster, "decode")
    time.sleep(0.1)
    assert steps(cluster, "decode") == after
    return after - before < MOST - 5


# -- one's own answer -------------------------------------------------------------


def test_det_01_det_03_hnd_24_alone_and_in_a_crowd(tight: Cluster) -> None:
    """Texts and pictures of many lengths, twelve at once in pools that hold two or three,
    while others are given up in the middle of their transfers."""
    asked = [question(number) for number in range(12)]
    alone = [tight.chat(one).text for one in asked]
    assert len(set(alone)) > 6, "the answers must tell the requests apart"
    for round in range(2):
        leavers = [Leaver(tight, question(100 + 10 * round + i, stream=True)) for i in range(6)]
        with ThreadPoolExecutor(1) as pool:
            crowd = pool.submit(at_once, tight, asked[::-1] if round else asked)
            for leaver in leavers:
                time.sleep(0.08)
                leaver.leave()
            replies = crowd.result()
        found = [reply.text for reply in (replies[::-1] if round else replies)]
        assert found == alone


@pytest.mark.parametrize("service", ["tight", "by_torch"])
def test_det_02_cold_and_warm(service: str, request: pytest.FixtureRequest) -> None:
    """The same again, all at once, after others, and after so many that no cache can hold it.

    What differs between them is the company that a token is computed in: a matrix product may
    take another way for another number of rows, and so may attention.
    """
    cluster: Cluster = request.getfixturevalue(service)
    scores = {"logprobs": True, "top_logprobs": 10}
    asked = [question(number, max_tokens=12, **scores) for number in COLD_AND_WARM]

    def answers() -> tuple[list[Any], list[int]]:
        """Texts with every likelihood, and of how many tokens of each prompt they are made."""
        replies = [cluster.chat(one).json for one in asked]
        usages = [reply["usage"] for reply in replies]
        computed = [
            usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
            for usage in usages
        ]
        return [reply["choices"] for reply in replies], computed

    cold, all_tokens = answers()
    warm, tokens = answers()
    assert warm == cold
    assert (17, 1) in zip(all_tokens, tokens, strict=True), "a token with sixteen others, and alone"
    assert [reply.json["choices"] for reply in at_once(cluster, asked)] == cold
    at_once(cluster, [question(number, max_tokens=2) for number in range(40, 52)])
    assert answers()[0] == cold
    at_once(cluster, [question(number, max_tokens=2) for number in range(60, 90)])
    assert answers() == (cold, all_tokens)


# -- pressure ---------------------------------------------------------------------


def test_hnd_28_lif_07_long_outputs_that_push_each_other_out(tight: Cluster) -> None:
    """Eight outputs of 190 tokens in a pool for two: all end, whole, and some always moves."""
    asked = [question(3 * n, max_tokens=190, stream=False) for n in range(8)]
    alone = tight.chat(asked[5]).text
    before = counter(tight.worker("decode").metrics(), "epd_preemptions_total")
    moved = [steps(tight, "decode")]
    with ThreadPoolExecutor(1) as pool:
        crowd = pool.submit(at_once, tight, asked)
        while not crowd.done():
            time.sleep(1.0)
            moved.append(steps(tight, "decode"))
            assert len(moved) < 16 or moved[-1] > moved[-16], "no token in 15 s"
        replies = crowd.result()
    assert [reply.json["usage"]["completion_tokens"] for reply in replies] == [190] * 8
    assert replies[5].text == alone
    assert counter(tight.worker("decode").metrics(), "epd_preemptions_total") > before


def test_hnd_29_a_burst_has_an_outcome_for_each(tight: Cluster) -> None:
    """120 pictures at once, 48 places: answered or refused with 429, nothing in between."""
    picture = file(solid("red", (96, 96)))
    asked = [body(picture, text(f"burst {i}"), max_tokens=2) for i in range(120)]
    outcomes = Counter(reply.status for reply in at_once(tight, asked))
    assert sum(outcomes.values()) == 120
    assert set(outcomes) <= {200, 429}, outcomes
    assert outcomes[200] >= 48


def test_hnd_08_cancelled_anywhere(tight: Cluster) -> None:
    """Half of forty requests are given up at a random moment: the others are answered, and
    afterwards (the fixture looks) nothing is held."""
    chance = random.Random(8)
    kept = [question(200 + n) for n in range(12)]
    with ThreadPoolExecutor(1) as pool:
        crowd = pool.submit(at_once, tight, kept)
        for n in range(28):
            leaver = Leaver(tight, question(300 + n, max_tokens=150, stream=bool(n % 2)))
            time.sleep(chance.uniform(0, 0.12))
            leaver.leave()
        for reply in crowd.result():
            assert reply.status == 200, reply


def test_lif_04_four_storms_and_a_probe(tight: Cluster) -> None:
    """All of a full pool is given up, again and again; nothing new is sent meanwhile."""
    for storm in range(4):
        leavers = [
            Leaver(tight, question(400 + 20 * storm + n, max_tokens=150, stream=True))
            for n in range(20)
        ]
        time.sleep(0.25)
        for leaver in leavers:
            leaver.leave()
    with soon(promised(5.0), instead_of="what nobody waits for any more"):
        assert tight.chat(question(3)).status == 200


# -- clients that leave ------------------------------------------------------------


@pytest.mark.parametrize("half", [False, True])
def test_lif_01_a_stream_that_is_left(tight: Cluster, half: bool) -> None:
    for _ in range(TRIES):
        before = steps(tight, "decode")
        leaver = Leaver(tight, question(1, max_tokens=MOST, stream=True))
        leaver.chunks(3)
        leaver.leave(half)
        cut_short = was_cut_short(tight, before)
        leaver.close()
        if cut_short:
            return
    pytest.fail("it was always made to its end")


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.1, 0.2, 0.4])
@pytest.mark.parametrize("stream", [False, True])
def test_lif_02_left_without_a_word(tight: Cluster, after_s: float, stream: bool) -> None:
    for number in range(TRIES):
        before = steps(tight, "decode")
        leaver = Leaver(tight, question(2, max_tokens=MOST, stream=stream))
        time.sleep(after_s / 2**number)
        leaver.leave()
        if was_cut_short(tight, before):
            return
    pytest.fail("it was always made to its end")


# -- memory of processes -------------------------------------------------------------


def resident(cluster: Cluster) -> dict[str, int]:
    return {m.role: psutil.Process(m.pid).memory_info().rss for m in cluster.members}


def test_lif_08_memory_does_not_grow_with_requests(tight: Cluster) -> None:
    """Pictures of their own, n > 1, bad ones and cancelled ones, after a warm-up of the same."""

    def rounds(first: int, count: int) -> Iterator[Body]:
        for n in range(first, first + count):
            picture = file(noise(512, 512, n))  # of 0.8 MB: a process that keeps them shows
            yield body(picture, text("a"), max_tokens=2)
            yield body(picture, text("b"), max_tokens=2, n=2)
            yield body(picture[:-40], text("bad"))

    def work(first: int, count: int) -> None:
        bodies = list(rounds(first, count))
        for start in range(0, len(bodies), 6):
            at_once(tight, bodies[start : start + 6])
            Leaver(tight, bodies[start] | {"max_tokens": 90}).leave()
        tight.assert_clean()

    work(1000, 24)
    before = resident(tight)
    work(2000, 48)
    after = resident(tight)
    grown = {role: after[role] - before[role] for role in before}
    assert all(more < max(0.05 * before[role], 12 << 20) for role, more in grown.items()), grown
