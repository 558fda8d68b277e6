"""How the benchmarks' flags are read."""

from __future__ import annotations


def whole_numbers(text: str) -> list[int]:
    """Of "1,2,4"; a ValueError, which argparse tells, for anything else."""
    return [int(part) for part in text.split(",")]
