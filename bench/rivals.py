"""The flags of `bench.compare` and `bench.interference` that both have: who is in it."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.contenders import Start, epd_in_turns, epd_unpinned, rival
from bench.flags import flag_parser
from bench.peers import servers

SLOW = ("transformers",)
"""Answer one request after another, so that a few show their rate: fewer requests, and
fewer rounds, or they would take all the time there is."""


def contest(about: str | None, minutes: float) -> argparse.ArgumentParser:
    """CHECKPOINT, OUT, how long, on how many threads, beside which rivals."""
    parser = flag_parser(about)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=minutes)
    parser.add_argument("--threads", type=int, default=2)
    for flag in ("--unpinned", "--turns"):
        parser.add_argument(
            flag, action="append", default=[], nargs="?", const="", metavar="SETTING,SETTING"
        )
    parser.add_argument("--vllm", type=Path, metavar="VENV")
    parser.add_argument("--preload", default="", help="libraries for vLLM: tcmalloc, OpenMP")
    parser.add_argument("--llama", default="", metavar="LLAMA-SERVER,MODEL.gguf,MMPROJ.gguf")
    parser.add_argument("--openvino", default="", metavar="VENV,MODEL", help="MODEL: exported")
    parser.add_argument("--transformers", type=Path, metavar="VENV")
    return parser


def sharing(given: argparse.Namespace) -> list[Start]:
    """Split `epd` whose processes share all cores, without turns and with them, as often as
    each was asked for."""
    checkpoint, out = given.checkpoint, given.out
    starts = [epd_unpinned(checkpoint, out, _settings(text)) for text in given.unpinned]
    for text in given.turns:
        starts.append(epd_in_turns(checkpoint, given.threads, out, _settings(text)))
    return starts


def _settings(text: str) -> list[str]:
    return text.split(",") if text else []


def rivals(given: argparse.Namespace, out: Path) -> list[Start]:
    """Those that were named, for `given.checkpoint` and `given.threads`; what they print goes
    to `out`."""
    checkpoint, threads = given.checkpoint, given.threads
    found = []
    if given.vllm:
        found.append(servers.vllm(given.vllm, checkpoint, threads, given.preload))
    if given.llama:
        binary, model, projector = map(Path, given.llama.split(","))
        found.append(servers.llama(binary, model, projector, threads))
    if given.openvino:
        venv, model = map(Path, given.openvino.split(","))
        found.append(servers.openvino(venv, model, threads))
    if given.transformers:
        found.append(servers.transformers(given.transformers, checkpoint, threads))
    return [rival(one, out / f"{one.name}.log", threads) for one in found]
