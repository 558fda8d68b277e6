"""A worker's memory in a process of its own, for the transfer tests.

Run as ``python -m tests.e2e.peer_process '{"seed": 1, ...}'``: starts an engine,
registers memory with known content, prints one JSON line about itself, then obeys
JSON lines on stdin, one answer line each. `PeerProcess` is the test's side of it.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from epd.config import TransferConfig
from epd.errors import EpdError
from epd.transfer.contract import Peer
from epd.transfer.engine import Engine
from epd.transfer.pieces import Piece
from tests.waiting import LIMIT_S, block_until

ROOT = Path(__file__).parents[2]
NBYTES = 64 << 20


def content(seed: int, nbytes: int) -> bytes:
    """What a peer's memory holds at the start."""
    return random.Random(seed).randbytes(nbytes)


class Memory:
    """Page-aligned host memory by address, without torch (the process starts fast)."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.bytes = mmap.mmap(-1, nbytes)
        self.bytes[:] = bytes(nbytes)
        self._exported = (ctypes.c_char * nbytes).from_buffer(self.bytes)
        self.address = ctypes.addressof(self._exported)


class PeerProcess:
    """Starts a peer and talks to it."""

    def __init__(self, **options: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.peer_process", json.dumps(options)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.info = self._answer()
        self.pid = self._process.pid

    @property
    def peer(self) -> Peer:
        return Peer(self.info["session"], self.info["epoch"], self.info["identity_address"])

    @property
    def address(self) -> int:
        return int(self.info["address"])

    def ask(self, op: str, **arguments: Any) -> Any:
        """Send a command, wait for its answer."""
        self.send(op, **arguments)
        return self._answer()

    def send(self, op: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self._process.stdin.flush()

    def stop(self) -> None:
        """SIGSTOP: alive for TCP, dead for everyone who waits for it."""
        os.kill(self.pid, signal.SIGSTOP)
        # On a crowded machine one thread may go on until another has seen the signal.
        tasks = Path(f"/proc/{self.pid}/task")
        block_until(lambda: all(_stopped(task) for task in tasks.iterdir()))

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait(LIMIT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"peer ended with {self._process.wait(LIMIT_S)}"
        return json.loads(line)


def _stopped(task: Path) -> bool:
    return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"


def handles() -> dict[str, int]:
    """What leaks show up in."""
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


class _Peer:
    """The process's own side: one method a command."""

    def __init__(self, options: dict[str, Any]) -> None:
        seed = options.pop("seed", 0)
        self.fingerprint = options.pop("fingerprint", "f00d")
        self.epoch = options.pop("epoch", seed + 100)
        self.memory = Memory(options.pop("nbytes", NBYTES))
        self.memory.bytes[:] = content(seed, self.memory.nbytes)
        self.engine = Engine(TransferConfig(**options), self.fingerprint, self.epoch)

    def start(self) -> dict[str, Any]:
        self.engine.start()
        self.engine.register(self.memory.address, self.memory.nbytes, self.memory)
        peer = self.engine.peer
        return {
            "session": peer.session,
            "epoch": peer.epoch,
            "identity_address": peer.identity_address,
            "address": self.memory.address,
            "transport": self.engine.transport,
        }

    async def poke(self, offset: int) -> None:
        """Change a byte, as an owner that breaks its word would."""
        self.memory.bytes[offset] ^= 0xFF

    async def handles(self) -> dict[str, int]:
        return handles()

    async def read(self, session: str, seconds: float) -> dict[str, Any]:
        """Read 64 bytes from another peer; what came of it, and the engine's health."""
        piece = Piece(self.memory.address, 4096, 64)
        try:
            await self.engine.read(Peer(session, 1, 4096), "f00d", [piece], self.memory, seconds)
            outcome = "done"
        except EpdError as error:
            outcome = error.message
        return {"outcome": outcome, "stuck_s": self.engine.stuck_s, "parked": self.engine.parked}

    async def health(self) -> dict[str, Any]:
        return {"stuck": self.engine.stuck, "stuck_s": self.engine.stuck_s}

    async def close(self, bound_s: float) -> bool:
        return await self.engine.close(bound_s)

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        lines: asyncio.Queue[str] = asyncio.Queue()

        def pump() -> None:
            for line in sys.stdin:
                loop.call_soon_threadsafe(lines.put_nowait, line)
            os._exit(0)  # the test is gone

        threading.Thread(target=pump, daemon=True).start()
        while True:
            command = json.loads(await lines.get())
            answer = await getattr(self, command.pop("op"))(**command)
            print(json.dumps(answer), flush=True)


def main() -> None:
    try:
        peer = _Peer(json.loads(sys.argv[1]))
        print(json.dumps(peer.start()), flush=True)
    except EpdError as error:
        print(json.dumps({"error": error.message, "param": error.param}), flush=True)
        os._exit(1)
    asyncio.run(peer.serve())


if __name__ == "__main__":
    main()
