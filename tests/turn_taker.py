"""A process that takes turns as it is told, since locks of one process are all its own.

    python -m tests.turn_taker FILE LONGEST_S LOOK_S

reads "take", "give", "wanted", "overruns" and "many" (turns) on stdin, a line each, and answers
when it is done.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from epd.obs import metrics
from epd.runtime.core_turns import LONGEST_S, LOOK_S, CoreTurns
from tests.readings import reading

MANY = 300
_ROOT = Path(__file__).resolve().parents[1]


class TurnTaker:
    """That process, from outside. `tell` and `hear` apart, since "take" may wait."""

    def __init__(self, file: Path, longest_s: float = LONGEST_S, look_s: float = LOOK_S) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(file), str(longest_s), str(look_s)],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.hear()

    def tell(self, word: str) -> None:
        assert self._process.stdin is not None
        print(word, file=self._process.stdin, flush=True)

    def hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def do(self, word: str) -> str:
        self.tell(word)
        return self.hear()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()


def main(file: str, longest_s: float, look_s: float) -> None:
    turns = CoreTurns(file, "decode", longest_s, look_s)
    print("ready", flush=True)
    for line in sys.stdin:
        match line.strip():
            case "take":
                turns.take()
                print(f"taken {'contended' if turns.contended else 'at once'}", flush=True)
            case "give":
                turns.give()
                print("given", flush=True)
            case "wanted":
                print(turns.wanted, flush=True)
            case "many":
                for _ in range(MANY):
                    turns.take()
                    turns.give()
                print("had", flush=True)
            case "overruns":
                print(int(reading(metrics.TURN_OVERRUNS.labels("decode"))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]))
