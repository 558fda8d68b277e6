"""Memory in large pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from epd.pages import LARGE, large_pages, touched, untouched

_SIZE = 3 * LARGE + 5
_REQUEST = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def test_a_tensor_has_its_place_size_and_zeros_and_lives_as_long_as_a_view_of_it() -> None:
    tensor = touched(_SIZE)
    assert tensor.data_ptr() % LARGE == 0
    assert tensor.numel() == _SIZE
    assert not tensor.any()
    view = tensor[-5:]
    del tensor
    view.fill_(7)
    assert view.sum() == 35


@pytest.mark.parametrize("nbytes", [1, 4096, LARGE, LARGE + 1])
def test_any_size(nbytes: int) -> None:
    memory = large_pages(nbytes)
    assert (memory.nbytes, memory.readonly) == (nbytes, False)
    memory[-1] = 1
    assert untouched(nbytes).numel() == nbytes


@pytest.mark.skipif(
    "[never]" in (_REQUEST.read_text() if _REQUEST.exists() else "[never]"),
    reason="this kernel gives no large pages",
)
def test_pages_are_large() -> None:
    code = (
        f"from epd.pages import touched; kept = touched({64 * LARGE}); "
        "print(open('/proc/self/smaps_rollup').read())"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = re.search(r"AnonHugePages: +(\d+) kB", said.stdout)
    assert found is not None
    assert int(found[1]) >= 32 * (LARGE >> 10), "most of it, whatever a full machine lacks"


def test_a_fork_does_not_have_it() -> None:
    """Else the first write to a page, of either, would copy 2 MiB."""
    tensor = touched(LARGE)
    address = f"{tensor.data_ptr():x}-"
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        os.write(writer, str(address in Path("/proc/self/maps").read_text()).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert address in Path("/proc/self/maps").read_text()
    assert os.read(reader, 10) == b"False"
    os.close(reader)
    os.close(writer)
