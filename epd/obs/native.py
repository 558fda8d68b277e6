"""What native libraries write to stderr of their own accord, for a moment at a time."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_log = logging.getLogger(__name__)
_STDERR = 2


@contextmanager
def native_stderr(source: str) -> Iterator[list[str]]:
    """Lines that come to stderr inside go to the log, at debug level, and into the list,
    which is filled at the end.

    Not for long: a process that dies inside takes its last words with it.
    """
    said: list[str] = []
    sys.stderr.flush()
    terminal, kept = os.dup(_STDERR), os.memfd_create("stderr")
    try:
        os.dup2(kept, _STDERR)
        yield said
    finally:
        sys.stderr.flush()
        os.dup2(terminal, _STDERR)
        with open(kept, "rb") as lines:
            lines.seek(0)
            said += lines.read().decode(errors="replace").splitlines()
        os.close(terminal)
        for line in said:
            _log.debug("%s: %s", source, line)
