"""``python -m tests.chaos.next_release ROLE ...``: `epd`, of a release to come."""

from __future__ import annotations

import runpy

import epd
import epd.runtime.stage

VERSION = "0.999.0"

if __name__ == "__main__":
    # A fork has imported those that say which release they are of.
    for module in (epd, epd.runtime.stage):
        vars(module)["__version__"] = VERSION
    runpy.run_module("epd.cli", run_name="__main__", alter_sys=True)
