"""From flags to a plan: everything that a user can get wrong is said by name."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Container
from typing import Any
from urllib.parse import urlsplit

from epd.bench.campaign import Plan
from epd.bench.load import Limits, Workload
from epd.bench.summary import Slo
from epd.bench.traces import Limits as TraceLimits
from epd.bench.traces import Trace, read_trace
from epd.bench.workload import Load, Shape, Template
from epd.errors import invalid

REQUESTS = 16
"""Of one round, where neither a flag nor a trace says how many."""


def with_defaults(flags: dict[str, Any]) -> dict[str, Any]:
    """A trace is played whole, with repeated pictures; without one all pictures are new."""
    traced = flags["trace"] is not None
    others = TraceLimits() if traced else TraceLimits(requests=REQUESTS, pool=0)
    defaults = {"requests": others.requests, "image_pool": others.pool}
    return flags | {name: value for name, value in defaults.items() if flags[name] is None}


def plan(flags: dict[str, Any]) -> tuple[Plan, Trace | None]:
    """What the flags, all of them given, ask for, and the trace where there is one.

    Raises:
        EpdError: INVALID_REQUEST, naming the flag.
    """
    loads = _loads(flags)
    extra: dict[str, Any] = {}
    for name in ("ignore_eos", "logprobs", "timeline"):
        if flags[name]:
            extra[name] = True
    slo = None
    if (flags["slo_ttft"] is None) != (flags["slo_tpot"] is None):
        raise invalid("an SLO needs both --slo-ttft and --slo-tpot", "slo_ttft")
    if flags["slo_ttft"] is not None:
        slo = Slo(flags["slo_ttft"], flags["slo_tpot"])
    shapes, trace = _requests(flags)
    workload = Workload(shapes, trace.requests if trace else (), extra, flags["seed"])
    limits = Limits(flags["timeout"], keep_connections=not flags["fresh_connections"])
    return Plan(workload, loads, flags["rounds"], limits, slo), trace


def _requests(flags: dict[str, Any]) -> tuple[list[Shape], Trace | None]:
    rng = random.Random(flags["seed"])
    if flags["trace"]:
        limits = TraceLimits(flags["requests"], pool=flags["image_pool"], zipf=flags["zipf"])
        return [], read_trace(flags["trace"], limits, rng)
    template = Template(
        flags["prompt_tokens"], flags["output_tokens"],
        tuple(_size(text) for text in flags["image"] or ()),
        flags["image_pool"], flags["zipf"], flags["prefix_tokens"],
    )  # fmt: skip
    return template.shapes(flags["requests"], rng), None


def _loads(flags: dict[str, Any]) -> list[Load]:
    in_flight = whole_numbers(flags["concurrency"], "concurrency")
    given = [Load("concurrency", value) for value in in_flight]
    given += [Load("rate", value) for value in numbers(flags["rate"], "rate")]
    if flags["trace"]:
        if given:
            raise invalid("a trace has its own arrivals: no --rate, no --concurrency", "trace")
        given = [Load("trace", value) for value in numbers(flags["speed"], "speed")]
    return given or [Load("concurrency", 1)]


def numbers(text: str, name: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = [0.0]
    if any(not 0 < value < math.inf for value in values):
        raise invalid(f"--{name} {text}: write numbers above 0, with commas", name)
    return values


def whole_numbers(text: str, name: str) -> list[int]:
    """Of requests in flight."""
    values = numbers(text, name)
    if any(value % 1 for value in values):
        raise invalid(f"--{name} {text}: requests in flight are whole ones", name)
    return [int(value) for value in values]


def _size(text: str) -> tuple[int, int]:
    width, by, height = text.lower().partition("x")
    if not (by and width.isdigit() and height.isdigit() and int(width) and int(height)):
        raise invalid(f"--image {text}: write WIDTHxHEIGHT", "image")
    return int(width), int(height)


def targets(given: list[str] | None) -> dict[str, str]:
    """URLs by the names that results go by.

    Raises:
        EpdError: INVALID_REQUEST, there are none, two of one name, or one that is no URL.
    """
    named = pairs(given, "target", "URL")
    if not named:
        raise invalid("give at least one --target NAME=URL", "target")
    for at, (name, url) in enumerate(named):
        if any(name == other for other, _ in named[:at]):
            raise invalid(f"--target {name}={url}: there is another target of that name", "target")
        if not _is_url(url):
            raise invalid(f"--target {name}={url}: no URL; write http://HOST:PORT/v1", "target")
    return dict(named)


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # no port, or no IPv6 address
        return False


def pairs(given: list[str] | None, name: str, value_name: str) -> list[tuple[str, str]]:
    pairs = []
    for text in given or ():
        key, equals, value = text.partition("=")
        if not (equals and key and value):
            raise invalid(f"--{name} {text}: write NAME={value_name}", name)
        pairs.append((key, value))
    return pairs


def _of_targets(
    given: list[str] | None, name: str, value_name: str, known: Container[str]
) -> list[tuple[str, str]]:
    found = pairs(given, name, value_name)
    for target, value in found:
        if target not in known:
            raise invalid(f"--{name} {target}={value}: there is no target {target}", name)
    return found


def pids(given: list[str] | None, known: Container[str]) -> dict[str, tuple[int, ...]]:
    """By target; `known` are the targets' names."""
    found: dict[str, tuple[int, ...]] = {}
    for name, pid in _of_targets(given, "pid", "PID", known):
        if not pid.isdigit():
            raise invalid(f"--pid {name}={pid}: not a number", "pid")
        found[name] = (*found.get(name, ()), int(pid))
    return found


def extras(given: list[str] | None, known: Container[str]) -> dict[str, dict[str, Any]]:
    """By target; `known` are the targets' names."""
    found: dict[str, dict[str, Any]] = {}
    for name, text in _of_targets(given, "extra", "JSON", known):
        try:
            found[name] = found.get(name, {}) | dict(json.loads(text))
        except (ValueError, TypeError) as error:
            raise invalid(f"--extra {name}={text}: not a JSON object", "extra") from error
    return found
