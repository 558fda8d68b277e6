"""Compile the attention kernel for GPUs that aren't here: `python -m tests.unit.gpu_compile`.

In a process of its own, since Triton's interpreter can't be switched off in one that uses it.
"""

from __future__ import annotations

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from epd.models.gpu.paged import _attend

SIZES = {"SHARE": 7, "BLOCK": 32, "D": 64, "E": 64, "D_WIDE": 64, "E_WIDE": 64}
TILES = {"ROWS": 64, "KEYS": 64}
NUMBERS = ("q", "keys", "values", "out")
TABLES = ("seen", "tile_first", "tile_count", "tile_sequence", "table")


def compiled(dtype: str, capability: int) -> dict[str, object]:
    """The kernel's code, by kind: Triton's own stages, "ptx", "cubin"."""
    constants = SIZES | TILES
    types = dict.fromkeys(_attend.arg_names, "i32") | {"scale": "fp32"}
    types |= dict.fromkeys(("k_block", "v_block"), "i64")
    types |= dict.fromkeys(NUMBERS, f"*{dtype}") | dict.fromkeys(TABLES, "*i32")
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(_attend, types, constants)
    return dict(triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        dtype, _, capability = argument.partition(":")
        code = compiled(dtype, int(capability)).get("cubin")
        print(argument, len(code) if isinstance(code, bytes) else 0)
