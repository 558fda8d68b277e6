"""A whole measurement: targets, loads, rounds in turn, and what is made of them."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from epd.bench.client import HttpTransport, Refused, open_session, send
from epd.bench.content import Words, body
from epd.bench.load import Limits, Round, Target, Workload, run_round
from epd.bench.record import Record
from epd.bench.summary import Slo, ratios, summarize
from epd.bench.workload import UNLOADED, Load, Shape
from epd.errors import EpdError, ErrorKind

_FEW, _MANY = 16, 116
_CALIBRATION_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    workload: Workload
    loads: Sequence[Load]
    rounds: int
    """Kept ones; one more comes first and is dropped."""
    limits: Limits = field(default_factory=Limits)
    slo: Slo | None = None
    """None: from unloaded medians, measured in every round too."""


@dataclass(slots=True)
class Results:
    targets: Sequence[str]
    """In the order given: the first one is what others are compared with."""
    rounds: list[Round] = field(default_factory=list)
    slo: Slo | None = None

    def of(self, target: str, load: Load) -> list[Round]:
        return [r for r in self.rounds if r.target == target and r.load == load]

    @property
    def loads(self) -> list[Load]:
        return list(dict.fromkeys(r.load for r in self.rounds))

    def summaries(self) -> list[dict[str, Any]]:
        """One of each target and load, and of each class of request in it."""
        rows = []
        for load, target in itertools.product(self.loads, self.targets):
            rounds = self.of(target, load)
            kinds = dict.fromkeys(record.kind for r in rounds for record in r.records)
            for kind in [None, *kinds] if len(kinds) > 1 else [None]:
                row = {"target": target, "load": str(load), "kind": kind or ""}
                rows.append(row | summarize(rounds, self.slo, kind))
        return rows

    def comparisons(self) -> list[dict[str, Any]]:
        """Every target over the first one."""
        base, *others = self.targets
        return [
            {"load": str(load), "of": name, "over": base}
            | {"ratios": ratios(self.of(name, load), self.of(base, load))}
            for load, name in itertools.product(self.loads, others)
        ]


async def connect(
    name: str,
    url: str,
    session: aiohttp.ClientSession,
    model: str = "",
    api_key: str = "none",
    pids: tuple[int, ...] = (),
    extra: Mapping[str, Any] | None = None,
) -> Target:
    """A target that answers; its first model where none is named.

    Raises:
        EpdError: STAGE_UNAVAILABLE, it doesn't.
    """
    target = Target(name, url, HttpTransport(url, session, api_key), model)
    target.pids, target.extra = pids, extra or {}
    if not target.model:
        target.model = await _first_model(target, session, api_key)
    target.words = await calibrate(target)
    return target


async def _first_model(target: Target, session: aiohttp.ClientSession, api_key: str) -> str:
    headers = {"Authorization": f"Bearer {api_key}"}
    asked = session.get(target.url.rstrip("/") + "/models", headers=headers)
    try:
        async with asyncio.timeout(_CALIBRATION_TIMEOUT_S), asked as response:
            body = await response.read()
            if response.status != 200:
                refused = f"http_{response.status}: {Refused(response.status, body)}"
                raise _unusable(target, f"its list of models: {refused}")
            return str(orjson.loads(body)["data"][0]["id"])
    except TimeoutError as error:
        reason = f"its list of models did not come within {_CALIBRATION_TIMEOUT_S:g} s"
        raise _unusable(target, reason) from error
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
        raise _unusable(target, f"its list of models can't be read: {_said(error)}") from error


def _said(error: Exception) -> str:
    """In aiohttp's words; Python's own mean nothing without their class."""
    return str(error) if isinstance(error, aiohttp.ClientError) else repr(error)


async def calibrate(target: Target) -> Words:
    """Ask for one token twice, and see what words cost in tokens.

    Raises:
        EpdError: STAGE_UNAVAILABLE, the target doesn't answer.
    """
    counts = []
    for words in (_FEW, _MANY):
        record = await _ask(target, Shape(words, 1))
        if not record.ok:
            raise _unusable(target, f"{record.error}: {record.detail}")
        counts.append(record.prompt_tokens)
    return Words.calibrate(_FEW, counts[0], _MANY, counts[1])


async def _ask(target: Target, shape: Shape) -> Record:
    """One request outside of all rounds."""
    now = asyncio.get_running_loop().time()
    record = Record(target.name, "warm-up", -1, 0, "", shape.output_tokens, 0, scheduled=now)
    sent = body(shape, target.model, target.words, random.Random(0), target.extra)
    await send(target.transport, sent, record, _CALIBRATION_TIMEOUT_S)
    return record


def _unusable(target: Target, why: str) -> EpdError:
    return EpdError(ErrorKind.STAGE_UNAVAILABLE, f"{target.name} ({target.url}): {why}")


async def measure(
    targets: Sequence[Target], plan: Plan, tell: Callable[[Round], None] = lambda _: None
) -> Results:
    """All targets under all loads, round after round, in turn: drift of the machine and
    other work on it hit all alike. The first round warms up and is dropped."""
    results = Results([target.name for target in targets], slo=plan.slo)
    loads = list(plan.loads)
    if plan.slo is None and UNLOADED not in loads and plan.workload.shapes:
        loads.insert(0, UNLOADED)
    for number in range(plan.rounds + 1):
        for load in loads:
            for target in in_turn(targets, number):
                done = await run_round(target, load, number, plan.workload, plan.limits)
                tell(done)
                if number:
                    results.rounds.append(done)
    if results.slo is None:
        results.slo = _common_slo(results)
    return results


def in_turn(targets: Sequence[Target], number: int) -> list[Target]:
    """Each round starts with another one."""
    start = number % len(targets)
    return [*targets[start:], *targets[:start]]


def _common_slo(results: Results) -> Slo | None:
    """One for all targets: that of the target whose unloaded medians are the least."""
    found = []
    for target in results.targets:
        records = [record for r in results.of(target, UNLOADED) for record in r.records]
        if slo := Slo.of_unloaded(records):
            found.append(slo)
    if not found:
        return None
    return Slo(min(s.ttft for s in found), min(s.tpot for s in found))


def session(plan: Plan) -> aiohttp.ClientSession:
    """Needs a running event loop."""
    return open_session(plan.limits.timeout_s, keep=plan.limits.keep_connections)
