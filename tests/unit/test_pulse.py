"""A process whose event loop stands still ends; one that was stopped itself does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from tests.waiting import LIMIT_S

LOOP = """
import asyncio, sys, time
from epd.pulse import pulse

async def main():
    beating = asyncio.create_task(pulse(float(sys.argv[1])))
    await asyncio.sleep(0)
    print("beats", flush=True)
    await asyncio.sleep(float(sys.argv[2]))
    time.sleep(float(sys.argv[3]))
    print("on", flush=True)

asyncio.run(main())
"""


def loop(limit_s: float, quick_s: float, still_s: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", LOOP, *map(str, (limit_s, quick_s, still_s))]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )


def test_a_loop_that_stands_still_ends_its_process_and_says_where() -> None:
    stuck = loop(1.0, 0.0, 10 * LIMIT_S)
    out, err = stuck.communicate(timeout=LIMIT_S)
    assert (stuck.returncode, out) == (1, "beats\n")
    assert "in main" in err
    assert err.endswith("the event loop has stood still for 1 s: giving up\n")


def test_last_words_that_nobody_reads_do_not_keep_it() -> None:
    stuck = loop(1.0, 0.0, 10 * LIMIT_S)
    assert stuck.stderr is not None
    full = os.open(f"/proc/{stuck.pid}/fd/2", os.O_WRONLY | os.O_NONBLOCK)
    try:
        while os.write(full, b"x" * 4096):
            pass
    except BlockingIOError:
        pass
    assert stuck.wait(LIMIT_S) == 1
    os.close(full)
    stuck.communicate()


def test_a_process_that_was_stopped_goes_on() -> None:
    stopped = loop(2.0, 6.0, 0.0)
    assert stopped.stdout is not None
    assert stopped.stdout.readline() == "beats\n"
    stopped.send_signal(signal.SIGSTOP)
    time.sleep(4.0)  # longer than its loop may stand still
    stopped.send_signal(signal.SIGCONT)
    out, _ = stopped.communicate(timeout=LIMIT_S)
    assert (stopped.returncode, out) == (0, "on\n")


def test_without_a_limit_nothing_ends() -> None:
    free = loop(0.0, 0.0, 1.5)
    out, _ = free.communicate(timeout=LIMIT_S)
    assert (free.returncode, out) == (0, "beats\non\n")
