"""Memory in large pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from epd.errors import EpdError
from epd.pages import LARGE, asked_for_by, large_pages, touched, untouched
from tests.unit.prefill_bench import Bench

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


def test_memory_that_there_is_not_is_said_with_the_key_that_asks_for_it() -> None:
    most, said = (1 << 31) - 1, r"^encode\.arena_mib and b: 2147483647 MiB: "
    with pytest.raises(EpdError, match=said) as caught, asked_for_by("encode.arena_mib", "b"):
        large_pages(most << 20)
    assert caught.value.param == "encode.arena_mib"


@pytest.mark.parametrize("key", ["kv.prefill_tokens", "prefill.landing_mib"])
def test_pools_that_dont_fit_are_named(key: str) -> None:
    settings: dict[str, Any] = {key.replace(".", "__"): (1 << 31) - 1}
    with pytest.raises(EpdError) as caught:
        Bench(**settings)
    assert caught.value.param == key


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


_FREED = """
import ctypes, sys
from epd.pages import give_back
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]

def anonymous():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Anonymous:"))

blocks = [libc.malloc(1 << 10) for _ in range(64 << 10)]
for block in blocks:
    ctypes.memset(block, 1, 1 << 10)
for block in blocks[:-1]:
    libc.free(block)
kept = anonymous()
give_back()
print(kept - anonymous())
"""


def test_what_the_heap_keeps_of_freed_blocks_goes_back_to_the_kernel() -> None:
    """In a process of its own: another's heap holds what other tests left there."""
    done = subprocess.run(
        [sys.executable, "-c", _FREED], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(done.stdout) > 48 << 10, "KiB of 64 MiB that were freed below a block in use"
