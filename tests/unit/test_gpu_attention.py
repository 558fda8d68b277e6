"""Attention for devices against the CPU's: Triton's kernel by its interpreter (on a GPU:
compiled), FlashAttention's call against a plain function that does what it documents."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from epd.kv.layout import KvLayout, LayerShape
from epd.kv.pool import KvPool
from epd.models.attention import paged_attention, plan_step
from epd.models.backends import device_attention
from epd.models.batch import SequenceSlice
from epd.models.gpu.attention import (
    DeviceAttention,
    _flash,
    choose,
    device_has_flash,
    has_triton,
    varlen_takes_pages,
)
from epd.models.gpu.tables import StepTensors, pack, step_shape

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYER: Any = SimpleNamespace(layer_idx=1)
BLOCKS = 80
paged_torch = pytest.mark.skipif(not varlen_takes_pages(), reason="torch before 2.12")
triton_only = pytest.mark.skipif(not has_triton(), reason="Triton is not installed")

# (query heads, key/value heads, key size, value size, tokens of a block)
SHAPES = [(6, 2, 8, 5, 4), (14, 2, 64, 64, 32), (4, 4, 40, 96, 7), (8, 1, 16, 16, 16)]
MIXED = [(1, 1), (1, 9), (5, 5), (3, 71), (1, 30), (16, 16), (37, 90)]
DECODE = [(1, 1), (1, 64), (1, 65), (1, 130)]
"""(new tokens, tokens in all)."""


class Scene:
    """Sequences with random keys, cached in scattered blocks; all else is NaN."""

    def __init__(
        self,
        sequences: list[tuple[int, int]],
        shape: tuple[int, int, int, int, int],
        dtype: str = "float32",
    ) -> None:
        self.heads, groups, d, e, size = shape
        generator, kind = torch.Generator().manual_seed(0), getattr(torch, dtype)
        layout = KvLayout(size, dtype, (LayerShape(groups, d, e),) * 2)
        self.pools = [KvPool(layout, BLOCKS, device) for device in ("cpu", DEVICE)]
        free = list(range(BLOCKS))
        random.Random(0).shuffle(free)
        self.slices = [
            SequenceSlice(n, length, [free.pop() for _ in range(layout.blocks_for(length))])
            for n, length in sequences
        ]
        total = sum(n for n, _ in sequences)
        self.q, self.k, self.v = (
            torch.randn(1, heads, total, width, generator=generator).to(kind)
            for heads, width in ((self.heads, d), (groups, d), (groups, e))
        )
        content = torch.randn(BLOCKS, layout.block_elements, generator=generator).to(kind)
        unused = torch.ones(BLOCKS, size, dtype=torch.bool)
        for s in self.slices:
            for place in range(s.kv_len - s.query_len):
                unused[s.blocks[place // size], place % size] = False
        for pool in self.pools:
            pool.bytes.view(kind).copy_(content)
            for cache in (pool.k(1), pool.v(1)):
                cache[unused.to(cache.device)] = float("nan")

    def run(self, backend: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """(what the device makes, what the CPU makes) [T, H, E]; caches must agree."""
        kernel = DeviceAttention(backend, self.heads // self.k.shape[1])
        outs = []
        for pool, used in zip(self.pools, (None, kernel), strict=True):
            step = plan_step(pool, self.slices, exact=False, kernel=used)
            q, k, v = (x.to(pool.device) for x in (self.q, self.k, self.v))
            out, _ = paged_attention(LAYER, q, k, v, None, step=step, **options)
            outs.append(out[0].cpu())
        plain, device = (pool.bytes.cpu() for pool in self.pools)
        assert torch.equal(plain, device)
        return outs[1], outs[0]


@triton_only
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sequences", [MIXED, DECODE], ids=["mixed", "decode"])
def test_triton_computes_attention(
    sequences: list[tuple[int, int]], shape: tuple[int, int, int, int, int], window: int | None
) -> None:
    found, wanted = Scene(sequences, shape).run("triton", sliding_window=window, scaling=0.3)
    assert torch.allclose(found, wanted, atol=2e-5, rtol=2e-5)


@triton_only
def test_triton_computes_in_16_bits() -> None:
    """The interpreter takes bfloat16 for integers in `tl.dot`, so float16 there."""
    dtype = "bfloat16" if DEVICE == "cuda" else "float16"
    found, wanted = Scene(MIXED, SHAPES[1], dtype).run("triton")
    assert (found.float() - wanted.float()).abs().max() < 0.03


@triton_only
def test_a_row_has_the_same_bits_in_every_batch() -> None:
    together, _ = Scene(MIXED, SHAPES[1]).run("triton")
    scene = Scene(MIXED, SHAPES[1])
    start = sum(n for n, _ in MIXED[:-1])
    scene.slices = scene.slices[-1:]
    scene.q, scene.k, scene.v = (x[:, :, start:] for x in (scene.q, scene.k, scene.v))
    alone, _ = scene.run("triton")
    assert torch.equal(alone, together[start:])


@triton_only
def test_rows_of_padding_are_zero() -> None:
    scene = Scene(MIXED, SHAPES[0])
    pad = (0, 0, 0, 3)
    scene.q, scene.k, scene.v = (
        torch.nn.functional.pad(x, pad) for x in (scene.q, scene.k, scene.v)
    )
    found, wanted = scene.run("triton")
    assert not found[-3:].any()
    assert torch.allclose(found[:-3], wanted[:-3], atol=2e-5)


@triton_only
def test_triton_compiles_for_gpus_that_are_not_here() -> None:
    """To machine code: Triton brings NVIDIA's assembler."""
    environ = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.unit.gpu_compile", "bf16:80", "fp16:90"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    sizes = [int(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(sizes) == 2
    assert min(sizes) > 10_000


def _varlen_by_hand(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor,
) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn` over pages, as its documentation says."""
    for numbers in (cu_seq_q, cu_seq_k, seqused_k, block_table):
        assert numbers.dtype is torch.int32
        assert numbers.is_contiguous()
    assert enable_gqa
    assert key.shape[1] % 256 == 0
    assert key.stride(-1) == value.stride(-1) == 1
    out = torch.empty(*query.shape[:2], value.shape[-1], dtype=query.dtype)
    left, right = window_size
    assert right == 0
    for i, length in enumerate(seqused_k.tolist()):
        rows = slice(int(cu_seq_q[i]), int(cu_seq_q[i + 1]))
        n = rows.stop - rows.start
        assert n <= max_q
        assert length <= max_k
        assert int(cu_seq_k[i + 1] - cu_seq_k[i]) == length
        k, v = (x[block_table[i].long()].flatten(0, 1)[:length] for x in (key, value))
        last = torch.arange(length - n, length)[:, None]
        seen = torch.arange(length)[None] <= last
        if left >= 0:
            seen &= torch.arange(length)[None] >= last - left
        q, k, v = (x.transpose(0, 1)[None] for x in (query[rows], k, v))
        got = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=scale, enable_gqa=True
        )
        out[rows] = got[0].transpose(0, 1)
    return out


@paged_torch
@pytest.mark.skipif(DEVICE == "cuda", reason="the real one is called by tests/gpu")
@pytest.mark.parametrize("window", [None, 9])
def test_flash_attention_is_asked_for_the_same(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", _varlen_by_hand)
    scene = Scene([(1, 1), (3, 300), (1, 513)], (4, 2, 16, 16, 256), "bfloat16")
    found, wanted = scene.run("varlen", sliding_window=window)
    assert (found.float() - wanted.float()).abs().max() < 0.02


@paged_torch
def test_the_real_function_takes_our_arguments() -> None:
    """On tensors without content: names, types and shapes pass torch's own operator."""
    layout = KvLayout(256, "bfloat16", (LayerShape(2, 16, 16),))
    sequences = [SequenceSlice(3, 300, [0, 1]), SequenceSlice(1, 4, [2])]
    shape = step_shape(layout, sequences, share=2)
    tables = StepTensors(shape, pack(layout, sequences, shape).to("meta"))
    keys, values = (torch.empty(3, 256, 2, 16, dtype=torch.bfloat16, device="meta") for _ in "kv")
    query = torch.empty(4, 4, 16, dtype=torch.bfloat16, device="meta")
    for window in (None, 9):
        _flash(query, keys, values, tables, 0.3, window, torch.empty_like(query))


def test_which_backend_fits() -> None:
    def layout(tokens: int, dtype: str, k: int = 64, v: int = 64) -> KvLayout:
        return KvLayout(tokens, dtype, (LayerShape(2, k, v),))

    assert choose(layout(256, "bfloat16"), pages=True, triton=True) == "varlen"
    assert choose(layout(512, "float16"), pages=True, triton=False) == "varlen"
    for other in (
        layout(32, "bfloat16"),
        layout(256, "float32"),
        layout(256, "bfloat16", 64, 32),
        layout(256, "bfloat16", 288, 288),
        layout(256, "bfloat16", 20, 20),
    ):
        assert choose(other, pages=True, triton=True) == "triton"
        assert choose(other, pages=True, triton=False) is None
    assert choose(layout(256, "bfloat16"), pages=False, triton=True) == "triton"


def test_a_torch_with_pages_is_recognised() -> None:
    """So that the skips above don't hide a changed signature."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    assert varlen_takes_pages() == ((major, minor) >= (2, 12))


@pytest.mark.parametrize(("capability", "has"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_flash_needs_ampere(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], has: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert device_has_flash() == has
    chosen = device_attention(KvLayout(256, "bfloat16", (LayerShape(2, 64, 64),)), 4)
    assert (chosen is not None and chosen.backend == "varlen") == (has and varlen_takes_pages())


def test_tables_say_what_the_sequences_say() -> None:
    layout = KvLayout(4, "float32", (LayerShape(2, 8, 8),))
    sequences = [SequenceSlice(1, 6, [9, 4]), SequenceSlice(5, 7, [3, 8, 1])]
    shape = step_shape(layout, sequences, share=32)
    tables = StepTensors(shape, pack(layout, sequences, shape))
    found = {name: tables[name].tolist() for name in shape.sections}
    assert found == {
        "write_block": [4, 3, 3, 8, 8, 8],
        "write_offset": [1, 2, 3, 0, 1, 2],
        "seen": [6, 3, 4, 5, 6, 7],
        "tile_first": [0, 1, 3, 5],
        "tile_count": [1, 2, 2, 1],
        "tile_sequence": [0, 1, 1, 1],
        "query_starts": [0, 1, 6],
        "kv_starts": [0, 6, 13],
        "kv_lengths": [6, 7],
        "table": [[9, 4], [3, 8]],
    }
    assert (shape.longest_query, shape.longest_kv, shape.tokens) == (5, 7, 6)
    assert all(tables[name].data_ptr() % 16 == 0 for name in shape.sections)


def test_a_fixed_width_makes_equal_shapes() -> None:
    layout = KvLayout(4, "float32", (LayerShape(2, 8, 8),))
    short, long = [SequenceSlice(1, 2, [0])], [SequenceSlice(1, 30, range(8))]
    assert step_shape(layout, short, 2, width=10) == step_shape(layout, long, 2, width=10)
