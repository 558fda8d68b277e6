"""Which cores a process runs on, and how its threads wait for each other."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

from epd.errors import invalid

_SPINS = "10000"
"""How often a thread looks before it sleeps: about 0.1 ms. A layer has six parallel regions,
and waking a sleeping thread for each costs more than what many of them compute; between steps
a thread must not keep a core from the other processes."""

_PAUSE_HARD = 2
"""omp_pause_hard of omp.h."""


def prepare_threads(threads: int) -> None:
    """Tell OpenMP and torch how many threads to use and how these wait. They read it once,
    when they are first imported."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


def release_threads() -> None:
    """End the threads that OpenMP keeps for the calling thread, which will not compute again.

    libgomp counts those of all callers. While they are more than there are cores, nobody's
    looks before it sleeps, whatever `_SPINS` says: every parallel region of the engine
    thread would then wake its helpers anew. Nothing without libgomp.
    """
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None:
        pause(_PAUSE_HARD)


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
        if last and int(last) < int(first):
            raise ValueError(f"{text!r}: {part.strip()} is no range of cores")
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
