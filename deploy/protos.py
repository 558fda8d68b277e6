"""Generate the Python stubs of protos/epd/v1, or check that the committed ones are current.

``python -m deploy.protos`` writes them; ``--check`` writes nothing and exits with 1 and a
list of files when a committed stub differs from what the .proto files give.
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


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        if "--check" in sys.argv[1:]:
            differing = stale(fresh)
            if differing:
                raise SystemExit(
                    "stubs differ from the protos (make protos): " + ", ".join(differing)
                )
            return
        for path in generate(fresh):
            shutil.copy(fresh / path, ROOT / path)


if __name__ == "__main__":
    main()
