"""Install the Mooncake build that fits this environment's torch, where there is a CUDA device.

    python -m deploy.mooncake_build [--extra cuda13]

`make setup` brings the build for CPUs, which no worker on a device takes (`epd.wheel`); `make
gpu-check` runs this before it looks at the device. Without a device nothing is changed.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from epd.wheel import EXTRAS, extra_for, installed_wheels, torch_cuda_major, wheel_problem

ROOT = Path(__file__).resolve().parent.parent
Run = Callable[[Sequence[str]], object]


def device_visible() -> bool:
    """Whether this machine has an NVIDIA driver, whatever torch was built for."""
    return Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None


def fit(run: Run, extra: str = "") -> str:
    """Exchange the builds that are installed for `extra`'s, or torch's own; what was done."""
    wheels, major = installed_wheels(), torch_cuda_major()
    problem = wheel_problem(wheels, "cuda", major)
    wanted = extra or (extra_for(major) if problem else "")
    if not wanted or [EXTRAS[name] for name in wheels] == [wanted]:
        return "Mooncake's build fits torch's"
    if major is None and not extra:
        return f"Mooncake is left as it is: {problem}"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    if wheels:
        run([*pip, "uninstall", "-q", "-y", *wheels])
    run([*pip, "install", "-q", "-c", str(ROOT / "constraints.txt"), "-e", f"{ROOT}[{wanted}]"])
    return f"Mooncake's build is now that of epd[{wanted}]"


def _call(command: Sequence[str]) -> None:
    subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--extra", choices=["", *EXTRAS.values()], default="")
    given = parser.parse_args()
    if device_visible():
        print(fit(_call, given.extra))


if __name__ == "__main__":
    main()
