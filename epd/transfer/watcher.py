"""The one thread that asks Mooncake how descriptors are doing.

An event loop sleeps in whole milliseconds (epoll), and for a descriptor of 4 MiB that is
half of its time: looked after from there, every read ended about a millisecond late. This
thread wakes the loop only when something has ended.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from epd.transfer.submitter import Native

log = logging.getLogger("epd.transfer")

Ended = list[tuple[int, bool]]
"""Tickets of ids that are terminal, and whether their bytes are here."""

_LEAST_PAUSE_S, _SHORT_PAUSE_S, _LONGEST_PAUSE_S = 0.0001, 0.0002, 0.002
_SHARE = 0.25
"""Of the time without news, before the next look: late by no more than that."""
_SOON_S = 0.1
"""A read in health is over by then. All its descriptors are under way together and end
together: without the shorter pause it was seen up to two of its 25 milliseconds late."""


class Watcher:
    """Follows every id to its end; calls `deliver(ended)` on its own thread.

    An id is an address that Mooncake gives away again as soon as its end was seen, maybe
    before anybody heard of that end: so each has a ticket, which stays its own.
    """

    def __init__(self, native: Native, deliver: Callable[[Ended], None]) -> None:
        self._new: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._stopping = False
        # A daemon, and the only one that refers to the engine: see Submitter.
        self._thread = threading.Thread(
            target=self._run, args=(native, deliver), name="epd-transfer-watch", daemon=True
        )
        self._thread.start()

    def watch(self, ticket: int, batch_id: int) -> None:
        """Follow it from now on."""
        self._new.put((ticket, batch_id))

    @property
    def alive(self) -> bool:
        """False after `stop`, or if the thread died of an error."""
        return self._thread.is_alive()

    def stop(self, bound_s: float) -> bool:
        """Follow nothing any more; false if a call into Mooncake does not return."""
        self._stopping = True
        self._new.put(None)
        self._thread.join(bound_s)
        return not self.alive

    def _run(self, native: Native, deliver: Callable[[Ended], None]) -> None:
        try:
            self._follow(native, deliver)
        except Exception:
            # Its ids stay unfollowed, which shows as stuck.
            log.critical("transfer: following reads failed", exc_info=True)

    def _follow(self, native: Native, deliver: Callable[[Ended], None]) -> None:
        watched: dict[int, int] = {}
        news = time.monotonic()
        while not self._stopping:
            if self._take(watched):
                news = time.monotonic()
            # 0: waiting; -2: late, but Mooncake still works on it. Only 1 and -1 are
            # ends, and an id is gone after its end: never ask again.
            states = ((t, native.transfer_check_status(one)) for t, one in watched.items())
            ended = [(ticket, state == 1) for ticket, state in states if state in (1, -1)]
            if ended:
                for ticket, _ in ended:
                    del watched[ticket]
                deliver(ended)
                news = time.monotonic()
            elif watched:
                time.sleep(pause_after(time.monotonic() - news))

    def _take(self, watched: dict[int, int]) -> bool:
        """Add what is new; waits while there is nothing to follow. True if there was any."""
        before = len(watched)
        while not (self._stopping or (watched and self._new.empty())):
            new = self._new.get()
            if new is not None:
                watched[new[0]] = new[1]
        return len(watched) > before


def pause_after(quiet_s: float) -> float:
    """Seconds until the next look, after so long without news."""
    longest = _SHORT_PAUSE_S if quiet_s < _SOON_S else _LONGEST_PAUSE_S
    return min(max(quiet_s * _SHARE, _LEAST_PAUSE_S), longest)
