"""The attention kernel against a plain one in float64; a row's bits are its own."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from epd.kv.layout import KvLayout, LayerShape
from epd.kv.pool import KvPool
from epd.models.attention import paged_attention, plan_step
from epd.models.batch import SequenceSlice
from epd.models.kernels import build
from epd.models.kernels.attention import AttentionKernel

LIBRARY = build.load()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="no kernels on this machine")
LAYER: Any = SimpleNamespace(layer_idx=1)
BLOCKS = 120

# (query heads, key/value heads, key size, value size, tokens of a block)
SHAPES = [(6, 2, 8, 5, 4), (14, 2, 64, 64, 32), (4, 4, 40, 96, 7), (11, 1, 16, 33, 16)]
MIXED = [(1, 1), (1, 9), (5, 5), (3, 71), (1, 30), (1, 33), (16, 16), (1, 48), (37, 90)]
"""(new tokens, tokens in all): whole prompts, later chunks, decode rows."""


class Scene:
    """Sequences with random keys, cached in scattered blocks; all else is NaN."""

    def __init__(
        self, sequences: list[tuple[int, int]], shape: tuple[int, ...] = SHAPES[0], seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        heads, groups, d, e, self.size = shape
        layout = KvLayout(self.size, "bfloat16", (LayerShape(groups, d, e),) * 2)
        self.pool = KvPool(layout, BLOCKS)
        self.pool.bytes.view(-1).view(torch.bfloat16).fill_(float("nan"))
        free = list(range(BLOCKS))
        random.Random(seed).shuffle(free)
        self.slices: list[SequenceSlice] = []
        self.q: list[Tensor] = []
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []
        for n, length in sequences:
            blocks = [free.pop() for _ in range(layout.blocks_for(length))]
            self.slices.append(SequenceSlice(n, length, blocks))
            for store, rows, width, count in (
                *((self.q, n, d, heads), (self.k, length, d, groups)),
                (self.v, length, e, groups),
            ):
                store.append(torch.randn(rows, count, width, generator=generator).bfloat16())
            self.cache(len(self.slices) - 1, length - n)

    def cache(self, i: int, count: int) -> None:
        """Put the first `count` keys and values of sequence `i` where they belong."""
        for place in range(count):
            block = self.slices[i].blocks[place // self.size]
            self.pool.k(1)[block, place % self.size] = self.k[i][place]
            self.pool.v(1)[block, place % self.size] = self.v[i][place]

    def run(self, threads: int = 1, padding: int = 0, **options: Any) -> list[Tensor]:
        assert LIBRARY is not None
        kernel = AttentionKernel(LIBRARY, threads)
        step = plan_step(self.pool, self.slices, exact=True, kernel=kernel)
        new = [len(q) for q in self.q]
        k = torch.cat([k[-n:] for k, n in zip(self.k, new, strict=True)])
        v = torch.cat([v[-n:] for v, n in zip(self.v, new, strict=True)])
        q, k, v = (
            torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding)).transpose(0, 1)[None]
            for x in (torch.cat(self.q), k, v)
        )
        out, _ = paged_attention(LAYER, q, k, v, None, step=step, **options)
        assert not out[0, sum(new) :].any()
        return list(out[0, : sum(new)].split(new))

    def wanted(self, i: int, window: int | None = None, scale: float | None = None) -> Tensor:
        """[n, H, E] of sequence `i`, as in a textbook."""
        q, k, v = (x[i].double().transpose(0, 1) for x in (self.q, self.k, self.v))
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        ends = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None]
        seen = torch.arange(k.shape[1])[None] <= ends
        if window:
            seen &= torch.arange(k.shape[1])[None] > ends - window
        scores = q @ k.transpose(1, 2) * (scale or q.shape[-1] ** -0.5)
        return (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v).transpose(0, 1)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("options", [{}, {"scaling": 0.7}, {"sliding_window": 20}], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_plain_attention_with_everything_else_poisoned(
    shape: tuple[int, ...], options: dict[str, Any], threads: int
) -> None:
    """A read of another sequence's block, or beyond a length, would give NaN."""
    scene = Scene(MIXED, shape)
    for i, out in enumerate(scene.run(threads, padding=3, **options)):
        wanted = scene.wanted(i, options.get("sliding_window"), options.get("scaling"))
        assert torch.allclose(out.double(), wanted, atol=8e-3, rtol=8e-3)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_writes_the_new_keys_and_nothing_else(shape: tuple[int, ...]) -> None:
    scene = Scene(MIXED, shape)
    scene.run()
    untouched = set(range(BLOCKS))
    for piece, k, v in zip(scene.slices, scene.k, scene.v, strict=True):
        table = torch.tensor(piece.blocks)
        for cache, wanted in ((scene.pool.k(1), k), (scene.pool.v(1), v)):
            assert torch.equal(cache[table].flatten(0, 1)[: piece.kv_len], wanted)
            assert cache[table].flatten(0, 1)[piece.kv_len :].isnan().all()
        untouched -= set(piece.blocks)
    assert scene.pool.k(1)[list(untouched)].isnan().all()
    assert scene.pool.k(0).isnan().all()


@settings(deadline=None, max_examples=40)
@given(
    length=st.integers(1, 100),
    cuts=st.sets(st.integers(1, 99), max_size=6),
    shape=st.sampled_from(SHAPES),
    window=st.sampled_from([None, 5, 40]),
    seed=st.integers(0, 99),
)
def test_bits_do_not_depend_on_chunks_or_company(
    length: int, cuts: set[int], shape: tuple[int, ...], window: int | None, seed: int
) -> None:
    whole = Scene([(length, length)], shape, seed)
    wanted = whole.run(sliding_window=window)[0]
    rows = []
    ends = [*sorted(cut for cut in cuts if cut < length), length]
    for start, end in zip([0, *ends], ends, strict=False):
        scene = Scene([(2, 7), (end - start, end), (1, 13)], shape, seed + 1)
        scene.q[1] = whole.q[0][start:end]
        scene.k[1], scene.v[1] = whole.k[0][:end], whole.v[0][:end]
        scene.cache(1, start)
        rows.append(scene.run(threads=1 + seed % 2, sliding_window=window)[1])
    assert torch.equal(torch.cat(rows), wanted)


def test_a_row_that_is_alone_has_the_bits_that_it_has_among_others() -> None:
    """Few rows go another way than many. Of results that differ before they are rounded one in
    some ten thousand shows it."""
    length = 90
    for seed in range(40):
        whole = Scene([(length, length)], SHAPES[1], seed)
        among = whole.run()[0]
        for end in range(length - 12, length + 1, 2):
            alone = Scene([(1, end)], SHAPES[1], seed + 1)
            alone.q[0] = whole.q[0][end - 1 : end]
            alone.k[0], alone.v[0] = whole.k[0][:end], whole.v[0][:end]
            alone.cache(0, end - 1)
            assert torch.equal(alone.run()[0], among[end - 1 : end])


def test_a_broken_request_breaks_no_other() -> None:
    scene, clean = Scene([(4, 9), (1, 20)]), Scene([(4, 9), (1, 20)])
    scene.q[1][:] = float("nan")
    broken, wanted = scene.run(), clean.run()
    assert torch.equal(broken[0], wanted[0])
    assert broken[1].isnan().all()


def test_large_scores_neither_overflow_nor_vanish() -> None:
    scene = Scene([(3, 40)])
    scene.q[0] *= 1000
    (out,) = scene.run()
    assert torch.allclose(out.double(), scene.wanted(0), atol=8e-3, rtol=8e-3)
