"""The flags that name rivals, of `bench.compare` and `bench.interference`."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.contenders import Start, rival
from bench.peers import servers

SLOW = ("transformers",)
"""Answer one request after another, so that a few show their rate: fewer requests, and
fewer rounds, or they would take all the time there is."""


def add_rivals(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vllm", type=Path, metavar="VENV")
    parser.add_argument("--preload", default="", help="libraries for vLLM: tcmalloc, OpenMP")
    parser.add_argument("--llama", default="", metavar="LLAMA-SERVER,MODEL.gguf,MMPROJ.gguf")
    parser.add_argument("--openvino", default="", metavar="VENV,MODEL", help="MODEL: exported")
    parser.add_argument("--transformers", type=Path, metavar="VENV")


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
