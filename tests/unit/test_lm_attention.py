"""Paged attention against a plain one in float64; sequences can't see each other."""

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
from epd.models.attention_plan import similar
from epd.models.batch import SequenceSlice

HEADS, GROUPS, K_DIM, V_DIM, SIZE = 6, 2, 8, 5, 4
LAYOUT = KvLayout(SIZE, "float32", (LayerShape(GROUPS, K_DIM, V_DIM),) * 2)
LAYER: Any = SimpleNamespace(layer_idx=1)

MIXED = [(1, 1), (1, 9), (5, 5), (3, 11), (1, 30), (1, 33), (16, 16), (1, 4), (9, 40)]
"""(new tokens, tokens in all): whole prompts, later chunks, decode rows."""


class Scene:
    """Sequences with random keys, cached in scattered blocks; all else is NaN."""

    def __init__(self, shapes: list[tuple[int, int]], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.shapes = shapes
        self.pool = KvPool(LAYOUT, 80)
        self.pool.bytes.view(-1).view(torch.float32).fill_(float("nan"))
        free = list(range(80))
        random.Random(seed).shuffle(free)
        self.sequences, self.q, self.k, self.v = [], [], [], []
        for n, length in shapes:
            blocks = [free.pop() for _ in range(LAYOUT.blocks_for(length))]
            self.sequences.append(SequenceSlice(n, length, blocks))
            self.q.append(torch.randn(n, HEADS, K_DIM, generator=generator))
            self.k.append(torch.randn(length, GROUPS, K_DIM, generator=generator))
            self.v.append(torch.randn(length, GROUPS, V_DIM, generator=generator))
            for place in range(length - n):
                block, offset = blocks[place // SIZE], place % SIZE
                self.pool.k(1)[block, offset] = self.k[-1][place]
                self.pool.v(1)[block, offset] = self.v[-1][place]

    def run(self, exact: bool, **options: Any) -> list[Tensor]:
        step = plan_step(self.pool, self.sequences, exact=exact)
        new = [n for n, _ in self.shapes]
        k = torch.cat([k[-n:] for k, n in zip(self.k, new, strict=True)])
        v = torch.cat([v[-n:] for v, n in zip(self.v, new, strict=True)])
        q, k, v = (x.transpose(0, 1)[None] for x in (torch.cat(self.q), k, v))
        out, _ = paged_attention(LAYER, q, k, v, None, step=step, **options)
        return list(out[0].split(new))


def plain(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """[n, H, E], one sequence, as in a textbook."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // GROUPS, 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * options.get("scaling", K_DIM**-0.5)
    if cap := options.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    ends = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None]
    places = torch.arange(k.shape[1])[None]
    seen = places <= ends
    if window := options.get("sliding_window"):
        seen &= places > ends - window
    scores = scores.masked_fill(~seen, float("-inf"))
    if (sinks := options.get("s_aux")) is not None:
        column = sinks.double().view(-1, 1, 1).expand(-1, q.shape[1], 1)
        scores = torch.cat([scores, column], -1)
    return (scores.softmax(-1)[..., : k.shape[1]] @ v).transpose(0, 1)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"scaling": 0.7},
    {"sliding_window": 6},
    {"softcap": 2.0},
    {"s_aux": torch.linspace(-1, 2, HEADS)},
    {"softcap": 1.5, "sliding_window": 3, "s_aux": torch.linspace(2, -2, HEADS)},
]


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(o) or "causal")
def test_equals_plain_attention_with_everything_else_poisoned(
    options: dict[str, Any], exact: bool
) -> None:
    """A read of another sequence's block, or beyond a length, would give NaN."""
    scene = Scene(MIXED)
    for i, out in enumerate(scene.run(exact, **options)):
        wanted = plain(scene.q[i], scene.k[i], scene.v[i], **options)
        assert torch.allclose(out.double(), wanted, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
def test_writes_the_new_keys_and_nothing_else(exact: bool) -> None:
    scene = Scene(MIXED)
    scene.run(exact)
    untouched = set(range(80))
    for sequence, k, v in zip(scene.sequences, scene.k, scene.v, strict=True):
        table = torch.tensor(sequence.blocks)
        for cache, wanted in ((scene.pool.k(1), k), (scene.pool.v(1), v)):
            assert torch.equal(cache[table].flatten(0, 1)[: sequence.kv_len], wanted)
            assert cache[table].flatten(0, 1)[sequence.kv_len :].isnan().all()
        untouched -= set(sequence.blocks)
    assert scene.pool.k(1)[list(untouched)].isnan().all()
    assert scene.pool.k(0).isnan().all()


def test_padding_rows_are_ignored_and_zero() -> None:
    """Exact mode pads the batch; those rows write nothing."""
    scene = Scene([(3, 3)])
    step = plan_step(scene.pool, scene.sequences, exact=True)
    pad = torch.nn.functional.pad
    q, k, v = (
        pad(x[0], (0, 0, 0, 0, 0, 13)).transpose(0, 1)[None] for x in (scene.q, scene.k, scene.v)
    )
    out, _ = paged_attention(LAYER, q, k, v, None, step=step)
    assert out.shape == (1, 16, HEADS, V_DIM)
    assert not out[0, 3:].any()
    assert torch.equal(out[0, :3], scene.run(True)[0])


@settings(deadline=None, max_examples=25)
@given(
    length=st.integers(1, 40),
    cuts=st.sets(st.integers(1, 39), max_size=6),
    option=st.sampled_from(OPTIONS),
    seed=st.integers(0, 99),
)
def test_exact_bits_do_not_depend_on_chunks_or_company(
    length: int, cuts: set[int], option: dict[str, Any], seed: int
) -> None:
    whole = Scene([(length, length)], seed)
    wanted = whole.run(True, **option)[0]
    rows = []
    ends = [*sorted(cut for cut in cuts if cut < length), length]
    for start, end in zip([0, *ends], ends, strict=False):
        scene = Scene([(2, 7), (end - start, end), (1, 13)], seed + 1)
        _replace(scene, 1, whole, start, end)
        rows.append(scene.run(True, **option)[1])
    assert torch.equal(torch.cat(rows), wanted)


def _replace(scene: Scene, i: int, other: Scene, start: int, end: int) -> None:
    """Let sequence `i` be rows [start, end) of `other`'s first one."""
    scene.q[i] = other.q[0][start:end]
    scene.k[i], scene.v[i] = other.k[0][:end], other.v[0][:end]
    for place in range(start):
        block = scene.sequences[i].blocks[place // SIZE]
        scene.pool.k(1)[block, place % SIZE] = scene.k[i][place]
        scene.pool.v(1)[block, place % SIZE] = scene.v[i][place]


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40))
def test_decode_rows_are_grouped_once_each_with_little_padding(lengths: list[int]) -> None:
    singles = [(i, SequenceSlice(1, n, [0])) for i, n in enumerate(lengths)]
    groups = similar(singles)
    assert sorted(row for group in groups for row, _ in group) == list(range(len(lengths)))
    for group in groups:
        sizes = [sequence.kv_len for _, sequence in group]
        assert max(sizes) * len(sizes) <= 1.25 * sum(sizes) + 64


def test_a_model_that_drops_the_keyword_is_noticed() -> None:
    none = torch.zeros(1, 1, 1, 1)
    with pytest.raises(AssertionError, match="keywords"):
        paged_attention(LAYER, none, none, none, None)


def test_block_table_must_cover_the_sequence() -> None:
    with pytest.raises(AssertionError, match="too short"):
        plan_step(KvPool(LAYOUT, 2), [SequenceSlice(1, SIZE + 1, [0])], exact=False)
