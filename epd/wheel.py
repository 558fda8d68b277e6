"""Which build of Mooncake is installed, and whether it is the right one for this torch.

The builds install the same files: two of them overwrite each other, and one for another
CUDA version does not import. Nothing here imports torch or mooncake.
"""

from __future__ import annotations

import re
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from epd.errors import invalid

EXTRAS = {
    "mooncake-transfer-engine-non-cuda": "cpu",
    "mooncake-transfer-engine": "cuda",
    "mooncake-transfer-engine-cuda13": "cuda13",
}
"""Distribution -> our extra that installs it."""

_CUDA_MAJORS = {"cpu": None, "cuda": 12, "cuda13": 13}
"""Extra -> CUDA major version that its build is for."""

_BY_CUDA_MAJOR = {major: extra for extra, major in _CUDA_MAJORS.items()}


def extra_for(cuda_major: int | None) -> str:
    """Our extra for a torch of this CUDA version; empty: Mooncake has no build for it."""
    return _BY_CUDA_MAJOR.get(cuda_major, "")


def installed_wheels() -> dict[str, str]:
    """Mooncake distributions in this environment with their versions."""
    found = {}
    for name in EXTRAS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def torch_cuda_major() -> int | None:
    """CUDA major version that the installed torch was built for; None for a CPU build.

    Read from torch's version file, since importing torch takes seconds.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text()
    match = re.search(r"^cuda\b[^=]*=\s*['\"](\d+)", text, re.MULTILINE)
    return int(match[1]) if match else None


def wheel_problem(wheels: dict[str, str], device: str, cuda_major: int | None) -> str | None:
    """What is wrong with the installed builds for a worker on this device, in one sentence.

    A CPU worker takes the CPU build with any torch, and a CUDA build with a torch of the
    same CUDA version: one for another looks for libraries that torch doesn't bring.
    """
    on_gpu = device.startswith("cuda")
    wanted = _BY_CUDA_MAJOR.get(cuda_major if on_gpu else None)
    if on_gpu and (cuda_major is None or wanted is None):
        built = "without CUDA" if cuda_major is None else f"for CUDA {cuda_major}"
        return f"device is {device}, but torch is built {built}: no Mooncake build fits it"
    if not wheels:
        return f"Mooncake is not installed: pip install 'epd[{wanted}]'"
    if len(wheels) > 1:
        names = " and ".join(wheels)
        return (
            f"{names} are installed together and overwrite each other's files: "
            f"pip uninstall -y {' '.join(wheels)}, then pip install 'epd[{wanted}]'"
        )
    (name,) = wheels
    matching = _BY_CUDA_MAJOR.get(cuda_major, wanted)
    if EXTRAS[name] in (wanted, matching):
        return None
    return (
        f"{name} ({_built(_CUDA_MAJORS[EXTRAS[name]])}) is the wrong Mooncake build: torch is "
        f"{_built(cuda_major)} and the device is {device}; "
        f"pip uninstall -y {name}, then pip install 'epd[{matching}]'"
    )


def _built(cuda_major: int | None) -> str:
    return "a CPU build" if cuda_major is None else f"built for CUDA {cuda_major}"


def require_mooncake(device: str) -> str:
    """Name of the one installed Mooncake distribution, for an engine about to import it.

    Raises:
        EpdError: none, several, or the wrong build is installed.
    """
    wheels = installed_wheels()
    problem = wheel_problem(wheels, device, torch_cuda_major())
    if problem:
        raise invalid(problem, "transfer")
    (name,) = wheels
    return name
