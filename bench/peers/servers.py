"""Rivals as processes: what starts each, and how to ask it.

    python -m bench.peers.servers vllm VENV CHECKPOINT [--threads 2] [--preload LIB:LIB]
    python -m bench.peers.servers transformers VENV CHECKPOINT
    python -m bench.peers.servers llama BINARY MODEL.gguf --mmproj MMPROJ.gguf
    python -m bench.peers.servers openvino VENV MODEL

serves until Ctrl-C or SIGTERM, and prints the URL and where the server's log is;
`bench.compare` starts them the same way.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.loopback import get

ROOT = Path(__file__).resolve().parents[2]
_POLL_S = 0.5
_STOP_S = 20.0
_OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
_OURS = ("PYTHONPATH", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS")
"""Of this process's environment, what must not reach a rival: its threads are its own."""


@dataclass(frozen=True, slots=True)
class Rival:
    """A server to start, with an OpenAI-compatible API under /v1."""

    name: str
    command: tuple[str, ...]
    port: int
    environ: Mapping[str, str] = field(default_factory=dict)
    model: str = "m"
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields that its requests must not have (None), or must."""
    start_limit_s: float = 600.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def vllm(venv: Path, checkpoint: Path, threads: int, preload: str = "") -> Rival:
    """vLLM's CPU build, compiled, its threads bound to the first cores. It asks for
    `preload`ed tcmalloc and Intel's OpenMP, and is slower without."""
    port = free_port()
    command = (
        str(venv / "bin" / "vllm"), "serve", str(checkpoint), "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "8192",
        "--served-model-name", "m", "--max-num-seqs", "64",
        # Without it, start-up encodes a video of the largest size to see what memory it takes.
        "--limit-mm-per-prompt", '{"image": 16, "video": 0}',
    )  # fmt: skip
    environ = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}" if threads > 1 else "0",
        "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
    }
    if preload:
        environ["LD_PRELOAD"] = preload
    return Rival("vllm", command, port, environ)


def transformers(venv: Path, checkpoint: Path, threads: int) -> Rival:
    """`transformers serve`. It refuses fields that it doesn't know."""
    port = free_port()
    command = (
        str(venv / "bin" / "transformers"), "serve", str(checkpoint), "--device", "cpu",
        "--dtype", "bfloat16", "--host", "127.0.0.1", "--port", str(port),
    )  # fmt: skip
    extra = {"ignore_eos": None}
    environ = {"OMP_NUM_THREADS": str(threads)}
    return Rival("transformers", command, port, environ, str(checkpoint), extra)


def llama(binary: Path, model: Path, projector: Path, threads: int) -> Rival:
    """llama.cpp's server; the checkpoint is converted before (README.md)."""
    port = free_port()
    command = (
        str(binary), "-m", str(model), "--mmproj", str(projector), "--host", "127.0.0.1",
        "--port", str(port), "-t", str(threads), "-tb", str(threads), "-np", "8",
        "-c", "16384", "--kv-unified", "-a", "m", "--no-ui", "--cache-ram", "0",
        # Mapped weights leave a full page cache while other servers are measured.
        "--load-mode", "none",
    )  # fmt: skip
    return Rival("llama.cpp", command, port)


def openvino(venv: Path, model: Path, threads: int) -> Rival:
    """OpenVINO GenAI, which has no server of its own in Python: `openvino_server` here. The
    checkpoint is exported before (README.md)."""
    port = free_port()
    command = (
        str(venv / "bin" / "python"), "-m", "bench.peers.openvino_server", str(model),
        "--port", str(port), "--threads", str(threads),
    )  # fmt: skip
    return Rival("openvino", command, port, {"PYTHONPATH": str(ROOT)})


@contextmanager
def running(rival: Rival, log: Path) -> Iterator[int]:
    """The rival, up and healthy, for the block; gives the pid that its processes descend
    from. What it prints goes to `log`.

    Raises:
        RuntimeError: it ended, or was not healthy within `start_limit_s`.
    """
    with starting(rival, log) as until_healthy:
        yield until_healthy()


@contextmanager
def starting(rival: Rival, log: Path) -> Iterator[Callable[[], int]]:
    """`running`, but the block calls what it gets to wait for that."""
    inherited = {key: value for key, value in os.environ.items() if key not in _OURS}
    environ = {**inherited, **_OFFLINE, **rival.environ}
    with log.open("wb") as out:
        process = subprocess.Popen(
            rival.command, env=environ, stdout=out, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, process_group=0,
        )  # fmt: skip
        end = time.monotonic() + rival.start_limit_s

        def until_healthy() -> int:
            _until_healthy(rival, process, log, end)
            return process.pid

        try:
            yield until_healthy
        finally:
            _stop(process)


def _until_healthy(rival: Rival, process: subprocess.Popen[bytes], log: Path, end: float) -> None:
    while not _healthy(rival):
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"{rival.name} did not start; see {log}")
        time.sleep(_POLL_S)


def _healthy(rival: Rival) -> bool:
    address = f"http://127.0.0.1:{rival.port}/health"
    try:
        with get(address, 2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Its whole process group: servers of several processes don't always end together."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("rival", choices=["vllm", "transformers", "llama", "openvino"])
    parser.add_argument("program", type=Path, help="virtual environment, or llama-server")
    parser.add_argument("checkpoint", type=Path, help="or what it was converted to")
    parser.add_argument("--mmproj", type=Path, default=Path())
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--preload", default="")
    parser.add_argument("--log", type=Path, help="default: a temporary file")
    given = parser.parse_args()
    rival, log = _chosen(given), given.log or _temporary_log(given.rival)
    print(f"log of {rival.name}: {log}", flush=True)
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background jobs ignore Ctrl-C
        signal.signal(number, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt), running(rival, log) as pid:
        print(f"{rival.name} at {rival.url}, model {rival.model}, pid {pid}", flush=True)
        signal.pause()


def _chosen(given: argparse.Namespace) -> Rival:
    program, checkpoint, threads = given.program, given.checkpoint, given.threads
    if given.rival == "vllm":
        return vllm(program, checkpoint, threads, given.preload)
    if given.rival == "llama":
        return llama(program, checkpoint, given.mmproj, threads)
    return {"transformers": transformers, "openvino": openvino}[given.rival](
        program, checkpoint, threads
    )


def _temporary_log(name: str) -> Path:
    with tempfile.NamedTemporaryFile(prefix=f"{name}-", suffix=".log", delete=False) as file:
        return Path(file.name)


if __name__ == "__main__":
    main()
