"""`make demo`: all services for real, pictures over HTTP, answers, and where the time went.

Exit code 0 means: every answer was the expected one and no process was left over.
"""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from openai import OpenAI

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "demo"
ASKED = (0, 1, 4)
"""Which of demo/questions.json: the same question about two pictures, and a count."""

_START_LIMIT_S = 180.0
_STOP_LIMIT_S = 30.0
_ANY_PORTS = ("gateway.http_port", "gateway.grpc_port", "gateway.membership_port")
_BAR_WIDTH = 40


@dataclass(frozen=True, slots=True)
class Question:
    pictures: tuple[str, ...]
    text: str
    expected: str

    def message(self) -> dict[str, Any]:
        """As a client of OpenAI's API writes it: pictures as data URLs, then the text."""
        parts: list[dict[str, Any]] = []
        for name in self.pictures:
            data = base64.b64encode((DEMO / "pictures" / name).read_bytes()).decode()
            url = f"data:image/png;base64,{data}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        return {"role": "user", "content": [*parts, {"type": "text", "text": self.text}]}


def questions() -> list[Question]:
    """The questions of demo/questions.json with the answers that the model must give."""
    return [
        Question(tuple(item["pictures"]), item["question"], item["answer"])
        for item in json.loads((DEMO / "questions.json").read_text())
    ]


class Failure(Exception):
    """The demonstration did not work; the message says why."""


@contextmanager
def service() -> Iterator[str]:
    """`epd serve` on free ports; gives the API's base URL, stops and checks on leaving."""
    settings = [part for key in _ANY_PORTS for part in ("--set", f"{key}=0")]
    command = [sys.executable, "-m", "epd.cli", "serve", str(DEMO / "checkpoint"), *settings]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    errors: deque[str] = deque(maxlen=30)
    assert process.stderr is not None
    threading.Thread(target=errors.extend, args=(process.stderr,), daemon=True).start()
    watchdog = threading.Timer(_START_LIMIT_S, process.kill)
    watchdog.start()
    try:
        url = _until_serving(process, errors)
        watchdog.cancel()
        yield url
    except BaseException:
        watchdog.cancel()
        process.terminate()
        process.communicate()
        raise
    _stop(process)


def _until_serving(process: subprocess.Popen[str], errors: deque[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        print("  " + line.rstrip())
        if " at http://" in line:
            return "http://" + line.partition(" at http://")[2].split()[0]
    process.wait()
    time.sleep(0.2)  # the thread that reads stderr may be a moment behind
    raise Failure("epd serve did not start:\n" + "".join(errors))


def _stop(process: subprocess.Popen[str]) -> None:
    """Ctrl-C, as a person would; then nothing may be left."""
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    try:
        rest, _ = process.communicate(timeout=_STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise Failure(f"epd serve did not stop within {_STOP_LIMIT_S:g} s") from None
    print("".join(f"  {line}\n" for line in rest.splitlines()), end="")
    if process.returncode != 0:
        raise Failure(f"epd serve ended with exit code {process.returncode}")
    time.sleep(0.5)  # helpers of the stages see their parent's end a moment later
    if left := [member for member in family if _runs(member)]:
        raise Failure(f"processes left over: {left}")


def _runs(process: psutil.Process) -> bool:
    """Dead ones that only wait to be collected by init don't count."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ask(client: OpenAI, question: Question) -> tuple[str, list[dict[str, Any]]]:
    """Stream the answer to the terminal; returns it with the phases of its timeline."""
    completions: Any = client.chat.completions
    stream = completions.create(
        model=client.models.list().data[0].id,
        messages=[question.message()],
        temperature=0,
        stream=True,
        extra_body={"timeline": True},
    )
    answer, phases = "", []
    for chunk in stream:
        for choice in chunk.choices:
            piece = choice.delta.content or ""
            print(piece, end="", flush=True)
            answer += piece
        timeline = (chunk.model_extra or {}).get("timeline")
        if timeline:
            phases = timeline["phases"]
    print()
    return answer, phases


def show_timeline(phases: list[dict[str, Any]]) -> None:
    """One line a phase, with a bar on a common scale of milliseconds."""
    end = max(phase["start_ms"] + phase["duration_ms"] for phase in phases)
    print(f"    {'phase':<24} {'starts':>9} {'takes':>9} {'bytes':>9}")
    for phase in phases:
        before = round(phase["start_ms"] / end * _BAR_WIDTH)
        length = max(1, round(phase["duration_ms"] / end * _BAR_WIDTH))
        size = f"{phase['bytes']:,}" if phase.get("bytes") else ""
        print(
            f"    {phase['name']:<24} {phase['start_ms']:>6.1f} ms {phase['duration_ms']:>6.1f} ms"
            f" {size:>9}  {' ' * before}{'#' * length}"
        )


def check(question: Question, answer: str, phases: list[dict[str, Any]]) -> None:
    """The right answer, by way of every stage.

    Raises:
        Failure: another answer, or a stage or a transfer is not in the timeline.
    """
    if answer != question.expected:
        raise Failure(f"expected {question.expected!r}, got {answer!r}")
    names = " ".join(phase["name"] for phase in phases)
    for part in ("encode", "embedding transfer", "prefill", "kv transfer", "decode"):
        if part not in names:
            raise Failure(f"no {part!r} in the timeline: {names}")


def main() -> int:
    known = questions()
    started = time.monotonic()
    try:
        print("Starting gateway, encode, prefill and decode:")
        with service() as url:
            client = OpenAI(base_url=url, api_key="none", timeout=60, max_retries=0)
            for number in ASKED:
                question = known[number]
                print(f"\n  {' + '.join(question.pictures)}: {question.text}\n  > ", end="")
                answer, phases = ask(client, question)
                show_timeline(phases)
                check(question, answer, phases)
            print("\nStopping:")
    except Failure as failure:
        print(f"demo: FAILED: {failure}", file=sys.stderr)
        return 1
    print(f"demo: {len(ASKED)} answers as expected, in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
