"""A gateway that was told to stop ends, whatever one of its parts does."""

from __future__ import annotations

import subprocess
import sys

STUCK = """
import asyncio, gateway.main as main

class Stuck:
    async def close(self):
        await asyncio.Event().wait()

main._CLOSE_S = 0.2
asyncio.run(main._close(Stuck()))
"""


def test_a_part_that_never_closes_is_named_and_left_behind() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUCK], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "not closed after 0.2 s" in done.stderr
