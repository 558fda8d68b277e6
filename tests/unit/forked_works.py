"""What the fork server's tests run: ``-m tests.unit.forked_works WHAT``."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from epd.forked import fork_helper, may_fork

_PUBLIC = ("torch", "transformers", "grpc", "mooncake")


def _facts() -> dict[str, object]:
    return {
        "argv": sys.argv[1:],
        "pid": os.getpid(),
        "parent": os.getppid(),
        "group": os.getpgrp(),
        "seen": Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").split(b"\0")[-1].decode(),
        "files": sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:-1],
        "threads": len(os.listdir("/proc/self/task")),
        "environ": os.environ.get("WHICH", ""),
        "may_fork": may_fork(),
        "signals": [signal.getsignal(n) is signal.SIG_DFL for n in (signal.SIGTERM,)],
        "imported": [name for name in _PUBLIC if name in sys.modules],
    }


def _helper() -> None:
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "a helper"]
    process = fork_helper(lambda: os.write(writer, json.dumps(_facts()).encode()), command, writer)
    os.close(writer)
    with open(reader) as answer:
        print(answer.read(), flush=True)
    sys.exit(process.wait(60))


def main(what: str) -> None:
    if what == "say":
        print(json.dumps(_facts()), flush=True)
        print("an error", file=sys.stderr, flush=True)
        sys.exit(3)
    if what == "helper":
        _helper()
    if what == "orphan" and os.fork():
        os._exit(0)  # the other one sleeps
    print(os.getpid(), flush=True)
    time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1])
