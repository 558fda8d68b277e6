"""Decode steps of models whose sizes fill no vector and no tile: by the shortcut, by the model's
own forward layer by layer, by torch alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epd.kv.pool import KvPool
from epd.models.kernels import build as kernels
from epd.models.lm import DecodeRow, ForwardBatch, LanguageModel, SequenceSlice
from tests.tiny import FAMILIES
from tests.tiny.build import build
from tests.tiny.shapes import SHAPES

pytestmark = pytest.mark.skipif(kernels.load() is None, reason="no kernels on this machine")
SIZE, BLOCKS, LONGEST = 8, 260, 70
Load = Callable[..., LanguageModel]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    threads = torch.get_num_threads()

    @cache
    def path(name: str) -> Path:
        family, text = SHAPES[name]
        return build(family, tmp_path_factory.mktemp("shapes"), "bfloat16", **text)

    @cache
    def made(name: str, **options: Any) -> LanguageModel:
        lm = LanguageModel.load(path(name), block_tokens=SIZE, **options)
        torch.set_num_threads(threads)
        return lm

    yield made
    torch.set_num_threads(threads)


class Scene:
    """Sequences that are cached already; some begin with the blocks of another."""

    def __init__(self, lm: LanguageModel, seed: int, lengths: list[int]) -> None:
        self.lm, chance = lm, random.Random(seed)
        self.pool = KvPool(lm.kv_layout, BLOCKS)
        self.delta = chance.randrange(40) if lm.continuation(0, 1, 0).shape[0] > 1 else 0
        self._free = list(range(BLOCKS))
        chance.shuffle(self._free)
        self._words = [i for i in range(lm.spec.vocab_size) if i != lm.spec.image_token_id]
        self.rows: list[DecodeRow] = []
        for length in lengths:
            self._add(chance, length)

    def _add(self, chance: random.Random, length: int) -> None:
        lm, shared = self.lm, []
        if self.rows and chance.random() < 0.4:
            other = chance.choice(self.rows)
            whole = min(length, other.kv_len - 1) // SIZE
            shared = list(other.blocks[: chance.randint(0, whole)])
        own = lm.kv_layout.blocks_for(length + 1) - len(shared)
        table = shared + [self._free.pop() for _ in range(own)]
        start = len(shared) * SIZE
        if start < length:
            ids = torch.tensor(chance.choices(self._words, k=length - start))
            piece = SequenceSlice(length - start, length, table)
            positions = lm.continuation(start, length - start, 0)
            lm.forward(ForwardBatch(ids, positions, [piece], []), self.pool)
        self.rows.append(DecodeRow(chance.choice(self._words), length + 1, self.delta, table))

    def copy(self) -> KvPool:
        pool = KvPool(self.lm.kv_layout, BLOCKS)
        pool.bytes.copy_(self.pool.bytes)
        return pool


def _one_by_one(lm: LanguageModel, rows: list[DecodeRow], pool: KvPool) -> torch.Tensor:
    """By the model's own forward, layer by layer."""
    whole, lm._whole_rows = lm._whole_rows, 0
    with torch.inference_mode():
        logits = lm._decode_by_forward(rows, pool)
    lm._whole_rows = whole
    return logits


@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    count=st.sampled_from([1, 1, 2, 3, 5, 11, 12, 13, 24, 25, 37, 64]),
    options=st.sampled_from(
        [{}, {"exact": True}, {"threads": 2}, {"quantize": "int8"}, {"threads": 2, "exact": True}]
    ),
    seed=st.integers(0, 1 << 20),
)
def test_a_step_of_any_shape_has_the_bits_of_its_layers_one_by_one(
    name: str, load: Load, count: int, options: dict[str, Any], seed: int
) -> None:
    lm = load(name, **options)
    assert lm._shortcut is not None
    chance = random.Random(seed)
    borders = [SIZE - 1, SIZE, SIZE + 1, 3 * SIZE - 1, 3 * SIZE]
    lengths = [chance.choice([*borders, chance.randint(1, LONGEST)]) for _ in range(count)]
    scene = Scene(lm, seed, lengths)
    apart = scene.copy()
    found, best = lm.decode(scene.rows, scene.pool)
    wanted = _one_by_one(lm, scene.rows, apart)
    assert torch.equal(found.float(), wanted)
    assert best == wanted.argmax(-1).tolist()
    assert torch.equal(scene.pool.bytes, apart.bytes)
    one = chance.randrange(count)
    alone = lm.decode([scene.rows[one]], apart).logits
    assert torch.equal(alone[0], found[one])


@pytest.mark.parametrize("name", SHAPES)
def test_a_step_of_any_shape_is_what_torch_computes(name: str, load: Load) -> None:
    kinds: tuple[Literal["auto", "off"], ...] = ("auto", "off")
    fast, plain = (load(name, kernels=kind) for kind in kinds)
    found, wanted = (Scene(lm, 3, [1, 7, 8, 9, 23, 24, 25, 66]) for lm in (fast, plain))
    assert _far(found.pool, wanted.pool) < 0.1
    wanted.pool.bytes.copy_(found.pool.bytes)
    ours, theirs = (s.lm.decode(s.rows, s.pool) for s in (found, wanted))
    assert ours.best is not None
    assert theirs.best is None
    assert (ours.logits.float() - theirs.logits).abs().max() < 0.1
    assert _far(found.pool, wanted.pool) < 0.1


def _far(one: KvPool, other: KvPool) -> float:
    numbers = (pool.bytes.view(torch.bfloat16).float() for pool in (one, other))
    return float(torch.sub(*numbers).abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_rotary_rows_made_ahead_are_those_of_single_positions(
    family: str, tiny_checkpoint: Callable[..., Path]
) -> None:
    """Far beyond what is compared when a model is loaded."""
    lm = LanguageModel.load(tiny_checkpoint(family, "bfloat16"))
    assert lm._shortcut is not None
    rotary = lm._shortcut._rotary
    rotary.reaching(40_000)
    module, x = lm.model.get_decoder().rotary_emb, torch.empty(0, dtype=torch.bfloat16)
    places = [*range(300), *range(4000, 4200), *range(32_700, 32_800), *range(1, 40_000, 997)]
    for count in (1, 3):
        for at in range(0, len(places), count):
            some = torch.tensor(places[at : at + count])
            made = module(x, some.expand((3, 1, -1) if len(rotary._shape) == 3 else (1, -1)))
            for table, rows in zip(rotary._tables, made, strict=True):
                assert torch.equal(table[some], rows[0])


def test_the_last_id_may_be_the_one_of_pictures(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is tried when a model is loaded is in its vocabulary."""
    from dataclasses import replace

    from epd.models import lm as module
    from epd.models.spec import read_spec

    def last(*args: Any) -> Any:
        spec = read_spec(*args)
        return replace(spec, image_token_id=spec.vocab_size - 1)

    monkeypatch.setattr(module, "read_spec", last)
    loaded = LanguageModel.load(tiny_checkpoint("llava_onevision", "bfloat16"))
    assert loaded._shortcut is not None
