"""`make demo`: all services for real, pictures over HTTP, answers, and where the time went.

Exit code 0 means: every answer was the expected one and no process was left over.
"""

from __future__ import annotations

import base64
import json
import sys
import time
from dataclasses import dataclass
from typing import Any

from openai import DefaultHttpxClient, OpenAI

from bench.service import ROOT, ServiceFailure, end_on_sigterm, epd_service

DEMO = ROOT / "demo"
ASKED = (0, 1, 4)
"""Which of demo/questions.json: the same question about two pictures, and a count."""

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
    end_on_sigterm()
    known = questions()
    started = time.monotonic()
    try:
        print("Starting gateway, encode, prefill and decode:")
        with epd_service(DEMO / "checkpoint", say=lambda line: print("  " + line)) as service:
            direct = DefaultHttpxClient(trust_env=False)  # no http_proxy of the environment
            client = OpenAI(
                base_url=service.url, api_key="none", timeout=60, max_retries=0, http_client=direct
            )
            for number in ASKED:
                question = known[number]
                print(f"\n  {' + '.join(question.pictures)}: {question.text}\n  > ", end="")
                answer, phases = ask(client, question)
                show_timeline(phases)
                check(question, answer, phases)
            print("\nStopping:")
    except (Failure, ServiceFailure) as failure:
        print(f"demo: FAILED: {failure}", file=sys.stderr)
        return 1
    print(f"demo: {len(ASKED)} answers as expected, in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
