"""Which cores a process runs on."""

from __future__ import annotations

import os
from collections.abc import Iterable

from epd.errors import invalid


def parse_cpus(text: str) -> frozenset[int]:
    """ "0,2-4" is {0, 2, 3, 4}; "" is none.

    Raises:
        ValueError: anything else.
    """
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{text!r}: write cores as 0,2-4")
        cpus |= set(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def joined(parts: Iterable[str]) -> str:
    """The cores of all parts; "" (anywhere) if one part may run anywhere."""
    texts = list(parts)
    return ",".join(texts) if all(texts) else ""


def pin(text: str) -> None:
    """Keep this process, and those that it starts from now on, on these cores; "": anywhere.
    Call before there are threads: those that exist stay where they are.

    Raises:
        EpdError: INVALID_REQUEST, none of the cores is there.
    """
    cpus = parse_cpus(text)
    if not cpus:
        return
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        there = sorted(os.sched_getaffinity(0))
        raise invalid(f"cores {text}: none of them is there (there are {there})", "cpus") from error
