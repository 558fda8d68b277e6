"""Loads on a virtual clock: arrivals, latencies, whole campaigns."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from epd.bench.campaign import Plan, Results, calibrate, measure
from epd.bench.load import Limits, Round, Target, Workload, run_round
from epd.bench.workload import Load, Shape, Template, Timed
from tests.unit.bench_script import DONE, At, Script, answer, refused, token, usage
from tests.unit.virtual_time import run

SHAPES = [Shape(20, 4)] * 10


def target(script: Script, name: str = "a") -> Target:
    return Target(name, "http://a/v1", script, "m")


def one_round(script: Script, load: Load, workload: Workload | None = None) -> Round:
    async def main() -> Round:
        return await run_round(target(script), load, 1, workload or Workload(SHAPES), Limits())

    return run(main())


def test_fixed_concurrency() -> None:
    script = Script(lambda _: answer(1.0, 0.5, 4))  # 2.5 s each
    done = one_round(script, Load("concurrency", 5))
    assert script.most == 5
    assert done.wall_s == pytest.approx(5.0), "two waves of five"
    assert all(r.latency == pytest.approx(2.5) for r in done.records)


def test_a_slow_server_can_not_hide_behind_the_client() -> None:
    """Two requests a second at a server that takes 1 s for one after another: request n
    must show the queue that it would have met, not 1 s (coordinated omission)."""
    script = Script(lambda _: answer(1.0, 0.0, 1), slots=1)
    trace = [Timed(0.5 * n, Shape(20, 1)) for n in range(8)]
    done = one_round(script, Load("trace", 1), Workload(trace=trace))
    assert [r.ttft for r in done.records] == pytest.approx([1.0 + 0.5 * n for n in range(8)])


def test_waiting_in_the_client_counts_too() -> None:
    async def main() -> Round:
        script = Script(lambda _: answer(1.0, 0.0, 1))
        trace = [Timed(0.0, Shape(20, 1))] * 3
        limits = Limits(max_in_flight=1)
        return await run_round(target(script), Load("trace", 1), 1, Workload(trace=trace), limits)

    done = run(main())
    assert [r.ttft for r in done.records] == pytest.approx([1.0, 2.0, 3.0])
    assert [r.lag for r in done.records] == pytest.approx([0.0, 1.0, 2.0])


def test_poisson_arrivals_have_their_rate() -> None:
    workload = Workload([Shape(20, 1)] * 2000)
    timed = workload.timed(Load("rate", 4.0), 1)
    assert timed[-1].at_s == pytest.approx(2000 / 4.0, rel=0.1)
    gaps = [b.at_s - a.at_s for a, b in pairwise(timed)]
    assert sum(gap > 1 / 4.0 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.05)


def test_a_trace_played_faster() -> None:
    workload = Workload(trace=[Timed(0.0, Shape(1, 1)), Timed(8.0, Shape(1, 1))])
    assert [t.at_s for t in workload.timed(Load("trace", 4), 1)] == [0.0, 2.0]


def test_targets_get_the_same_requests_and_rounds_other_ones() -> None:
    bodies: dict[str, list[dict[str, Any]]] = {}
    workload = Workload(Template(20, 4, ((28, 28),)).shapes(3, random.Random(0)))

    async def main() -> None:
        for name, number in (("a", 1), ("b", 1), ("c", 2)):
            script = Script(lambda _: answer(1.0, 0.5, 4))
            await run_round(target(script), Load("concurrency", 1), number, workload, Limits())
            bodies[name] = script.bodies

    run(main())
    assert bodies["a"] == bodies["b"]
    for mine, other in zip(bodies["a"], bodies["c"], strict=True):
        assert mine["messages"][0]["content"][0] != other["messages"][0]["content"][0]
        assert mine["messages"][0]["content"][1] != other["messages"][0]["content"][1]


def campaign(plan: Plan, *scripts: Script) -> tuple[Results, list[str]]:
    order: list[str] = []

    async def main() -> Results:
        targets = [target(script, name) for script, name in zip(scripts, "ab", strict=False)]
        return await measure(targets, plan, lambda done: order.append(done.target))

    return run(main()), order


def test_a_comparison_is_interleaved_and_its_ratio_right() -> None:
    plan = Plan(Workload(SHAPES), [Load("concurrency", 1)], rounds=3)
    results, order = campaign(
        plan, Script(lambda _: answer(1.0, 0.5, 4)), Script(lambda _: answer(3.0, 0.25, 4))
    )
    assert "".join(order) == "abbaabba"
    (compared,) = results.comparisons()
    assert (compared["of"], compared["over"]) == ("b", "a")
    assert compared["ratios"]["ttft_s p50"] == pytest.approx({"median": 3, "min": 3, "max": 3})
    assert compared["ratios"]["tpot_s p50"]["median"] == pytest.approx(0.5)
    assert compared["ratios"]["req_s"]["median"] == pytest.approx(2.5 / 3.75)
    rows = {row["target"]: row for row in results.summaries()}
    assert rows["a"]["ttft_s"]["p50"] == pytest.approx(1.0)
    assert rows["b"]["latency_s"]["p99"] == pytest.approx(3.75)
    assert rows["a"]["tok_s"] == pytest.approx(4 / 2.5)
    assert rows["a"]["requests"] == 30, "the first round is dropped"


def test_goodput_under_load() -> None:
    """Unloaded: 1 s and 0 s. One server, slots for one: of eight at once, five come within
    5 s."""
    script = Script(lambda _: answer(1.0, 0.0, 2), slots=1)
    plan = Plan(Workload([Shape(20, 2)] * 8), [Load("concurrency", 8)], rounds=1)
    results, _ = campaign(plan, script)
    assert results.slo is not None
    assert results.slo.ttft == pytest.approx(5.0)
    (loaded,) = [row for row in results.summaries() if row["load"] == "concurrency 8"]
    assert loaded["good_share"] == pytest.approx(5 / 8)
    assert loaded["good_req_s"] == pytest.approx(5 / 8)


def test_errors_are_counted_and_never_a_latency() -> None:
    answers = iter([answer(1.0, 0.5, 4), refused(503)] * 40)
    script = Script(lambda _: next(answers))
    plan = Plan(Workload(SHAPES), [Load("concurrency", 1)], rounds=1)
    results, _ = campaign(plan, script)
    (row,) = results.summaries()
    assert row["errors"] == {"http_503": 5}
    assert (row["ok"], row["ttft_s"]["count"]) == (5, 5)


def test_classes_of_requests_are_summed_up_apart() -> None:
    trace = [Timed(0.0, Shape(20, 4, kind="steady")), Timed(1.0, Shape(20, 2, kind="burst"))]
    plan = Plan(Workload(trace=trace), [Load("trace", 1)], rounds=1)
    results, _ = campaign(plan, Script(lambda body: answer(1.0, 0.5, body["max_tokens"])))
    found = {row["kind"]: row["requests"] for row in results.summaries()}
    assert found == {"": 2, "steady": 1, "burst": 1}


def test_calibration_learns_what_words_cost() -> None:
    """A server with 9 tokens of template and 1.5 tokens a word."""

    def script(body: dict[str, Any]) -> list[At]:
        words = len(body["messages"][0]["content"].split())
        return [At(0.0, token("x") + usage(9 + words * 3 // 2, 1) + DONE)]

    words = run(calibrate(target(Script(script))))
    assert words.tokens_per_word == pytest.approx(1.5)
    text = words.text(Shape(300, 1), random.Random(0))
    assert len(text.split()) == 200
