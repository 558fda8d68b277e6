"""An event loop that stands still can't say so: a thread watches it, and ends the process.

Whoever waits for it sees its connections break and goes elsewhere; whoever started it
starts it again. Where it stood is in its last words.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import threading

_ROUND_S = 1.0
_TELL_S = 2.0
"""Time for last words: what keeps the loop may be that nobody reads what it writes."""


async def pulse(limit_s: float) -> None:
    """Beat for ever; when no beat came for `limit_s` (0: never mind), this process ends with
    exit code 1."""
    watch = _Watch(limit_s)
    try:
        while True:
            watch.beats += 1
            await asyncio.sleep(watch.round_s)
    finally:
        watch.over.set()


class _Watch:
    """Counts in rounds of its own: while the whole process was stopped, nothing could move."""

    def __init__(self, limit_s: float) -> None:
        self.beats = 0
        self.over = threading.Event()
        self.round_s = min(_ROUND_S, limit_s / 4) if limit_s else _ROUND_S
        self._limit_s = limit_s
        if limit_s:
            threading.Thread(target=self._run, name="pulse", daemon=True).start()

    def _run(self) -> None:
        seen, still_s = -1, 0.0
        while not self.over.wait(self.round_s):
            still_s = still_s + self.round_s if self.beats == seen else 0.0
            seen = self.beats
            if still_s > self._limit_s:
                _give_up(still_s)


def _give_up(still_s: float) -> None:
    # Not to stderr at once: what is written to it waits with Python's lock in hand.
    kept = os.memfd_create("last words")
    faulthandler.dump_traceback(kept)
    os.write(kept, f"the event loop has stood still for {still_s:.0f} s: giving up\n".encode())
    words = os.pread(kept, os.fstat(kept).st_size, 0)
    teller = threading.Thread(target=os.write, args=(2, words), daemon=True)
    teller.start()
    teller.join(_TELL_S)
    os._exit(1)
