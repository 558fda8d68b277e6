"""Generate the Python stubs of protos/epd/v1, or check the committed ones and the last change.

``python -m deploy.protos`` writes them; ``--check`` writes nothing and exits with 1 and a
list when a committed stub differs from what the .proto files give, or when the last change
of the .proto files breaks old peers (the rules are in buf.yaml).
"""

from __future__ import annotations

import filecmp
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path("protos/epd/v1")


def generate(into: Path) -> list[Path]:
    """Run protoc into a folder; returns the stubs' paths relative to it."""
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / FOLDER).glob("*.proto"))
    outputs = [f"--{kind}_out={into}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    # protoc finds the mypy plugins on the PATH; they are installed beside this interpreter.
    scripts = str(Path(sys.executable).parent)
    environ = os.environ | {"PATH": os.pathsep.join([scripts, os.environ.get("PATH", "")])}
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, *sources]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"protoc failed:\n{done.stderr}")
    return sorted(path.relative_to(into) for path in (into / FOLDER).iterdir())


def stale(fresh: Path) -> list[str]:
    """Committed stubs that differ from freshly generated ones, are missing, or have no source."""
    expected = {str(path) for path in generate(fresh)}
    committed = {str(path.relative_to(ROOT)) for path in (ROOT / FOLDER).glob("*_pb2*.py*")}
    changed = {
        path
        for path in expected & committed
        if not filecmp.cmp(fresh / path, ROOT / path, shallow=False)
    }
    return sorted(changed | (expected ^ committed))


def before() -> str | None:
    """The commit with the protos as they were before their last change: HEAD, where that change
    is not committed yet. None: there was none, or git's history is not here."""
    sources = f"{FOLDER}/*.proto"
    if _git("diff", "--name-only", "HEAD", "--", sources):
        return "HEAD"
    changed = _git("log", "-1", "--format=%H", "--", sources)
    return _git("rev-parse", "--verify", "--quiet", f"{changed}^") if changed else None


def _git(*arguments: str) -> str | None:
    """What git says; None when it refuses, or isn't there."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return None if done.returncode else done.stdout.strip()


def breaks(revision: str, folder: Path) -> str:
    """What an old peer would not understand any more, in buf's words; "": nothing."""
    old = folder / "old.tar"
    archived = _git("archive", f"--output={old}", revision, "--", str(FOLDER))
    assert archived is not None, f"{revision} has no {FOLDER}"
    buf = [str(Path(sys.executable).parent / "buf"), "breaking", "--against-config=buf.yaml"]
    done = subprocess.run([*buf, f"--against={old}"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout + done.stderr if done.returncode else ""


def check(folder: Path) -> None:
    """Raises:
    SystemExit: the stubs are stale, or the last change is one that breaks peers.
    """
    differing = stale(folder)
    if differing:
        raise SystemExit("stubs differ from the protos (make protos): " + ", ".join(differing))
    revision = before()
    if revision is None:
        print("no earlier protos in git's history: not compared")
    elif broken := breaks(revision, folder):
        raise SystemExit(f"the protos of {revision[:9]} are other peers':\n{broken}")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "--check" in sys.argv[1:]:
            check(folder)
            return
        for path in generate(folder):
            shutil.copy(folder / path, ROOT / path)


if __name__ == "__main__":
    main()
