"""How the benchmarks' flags are read."""

from __future__ import annotations

import argparse


def flag_parser(about: str | None) -> argparse.ArgumentParser:
    """Whose help begins with a module's docstring, in the lines that it has there."""
    return argparse.ArgumentParser(description=about, formatter_class=argparse.RawTextHelpFormatter)


def whole_numbers(text: str) -> list[int]:
    """Of "1,2,4"; a ValueError, which argparse tells, for anything else."""
    return [int(part) for part in text.split(",")]
