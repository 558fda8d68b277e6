"""Decode by CUDA graphs, on the CPU: a graph that is a function called again stands in for
CUDA's, so that buffers, buckets and filler rows are the real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from epd.errors import EpdError
from epd.kv.pool import KvPool
from epd.models.attention import AttentionStep
from epd.models.backends import usable_device
from epd.models.gpu.attention import DeviceAttention, has_triton
from epd.models.gpu.graphs import CudaCapture, DecodeGraphs, Graph, bucket_for, buckets
from epd.models.lm import ForwardBatch, LanguageModel, SequenceSlice
from tests.tiny import FAMILIES

triton_only = pytest.mark.skipif(not has_triton(), reason="Triton is not installed")
BLOCKS = 12


def test_buckets() -> None:
    assert buckets(1) == [1]
    assert buckets(4) == [1, 2, 4]
    assert buckets(20) == [1, 2, 4, 8, 16, 20]
    assert buckets(32) == [1, 2, 4, 8, 16, 24, 32]
    assert [bucket_for(n, [1, 2, 4, 8]) for n in (1, 2, 3, 5, 8, 9)] == [1, 2, 4, 8, 8, None]


class _Again:
    """Replays by calling: kernels read the buffers' new contents, as in a graph."""

    def __init__(self, function: Callable[[], Tensor], out: Tensor) -> None:
        self._function, self._out = function, out
        self.replays = 0

    def replay(self) -> None:
        self._out.copy_(self._function())
        self.replays += 1


class _Recorder:
    def __init__(self) -> None:
        self.graphs: list[_Again] = []

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        out = function()
        self.graphs.append(_Again(function, out))
        return self.graphs[-1], out


def _graphs(lm: LanguageModel, pool: KvPool, recorder: _Recorder) -> DecodeGraphs:
    kernel = DeviceAttention("triton", 4)
    rows = len(lm.continuation(0, 1, 0))
    return DecodeGraphs(
        lm._run,
        kernel,
        pool,
        sizes=buckets(4),
        position_rows=rows,
        max_context=100,
        capture=recorder,
    )


def _prefill(lm: LanguageModel, pool: KvPool, lengths: list[int]) -> list[SequenceSlice]:
    """Prompts in scattered blocks; the slices of their next token."""
    free, slices = list(range(BLOCKS))[::-1], []
    size = lm.kv_layout.block_tokens
    for i, length in enumerate(lengths):
        blocks = [free.pop() for _ in range(-(-(length + 2) // size))]
        ids = torch.randint(10, 200, (length,), generator=torch.Generator().manual_seed(i))
        sequence = SequenceSlice(length, length, blocks)
        batch = ForwardBatch(ids, lm.continuation(0, length, 0), [sequence], [length - 1])
        lm.forward(batch, pool)
        slices.append(SequenceSlice(1, length + 1, blocks))
    return slices


def _decode(lm: LanguageModel, slices: list[SequenceSlice], first_id: int = 20) -> ForwardBatch:
    positions = [lm.continuation(s.kv_len - 1, 1, 0) for s in slices]
    ids = torch.arange(len(slices)) + first_id
    return ForwardBatch(ids, torch.cat(positions, 1), slices, range(len(slices)))


@triton_only
@pytest.mark.parametrize("family", ["qwen3_vl", "llava_onevision"])
def test_a_replayed_step_equals_a_plain_one(
    family: str, tiny_checkpoint: Callable[..., Path]
) -> None:
    lm = LanguageModel.load(tiny_checkpoint(family), block_tokens=8, kernels="off")
    plain, pool = KvPool(lm.kv_layout, BLOCKS), KvPool(lm.kv_layout, BLOCKS, spare=1)
    recorder = _Recorder()
    with torch.inference_mode():
        lm._graphs = _graphs(lm, pool, recorder)
    assert not any(graph.replays for graph in recorder.graphs)
    slices, _ = (_prefill(lm, p, [5, 9, 20]) for p in (plain, pool))
    batches = [
        _decode(lm, slices),  # three rows in a bucket of four
        _decode(lm, slices[1:2], 40),
        _decode(lm, [SequenceSlice(1, s.kv_len + 1, s.blocks) for s in slices[::2]], 60),
    ]
    for batch in batches:
        wanted, found = lm.forward(batch, plain), lm.forward(batch, pool)
        assert found.shape == wanted.shape
        assert torch.allclose(found, wanted, atol=1e-4)
    assert sum(graph.replays for graph in recorder.graphs) == len(batches)
    assert torch.allclose(_keys(pool), _keys(plain), atol=1e-4)  # filler rows wrote elsewhere


def _keys(pool: KvPool) -> Tensor:
    return pool.bytes.view(torch.float32)


@triton_only
def test_what_fits_no_bucket_runs_as_before(tiny_checkpoint: Callable[..., Path]) -> None:
    lm = LanguageModel.load(tiny_checkpoint("qwen3_vl"), block_tokens=8, kernels="off")
    pool, recorder = KvPool(lm.kv_layout, BLOCKS, spare=1), _Recorder()
    with torch.inference_mode():
        lm._graphs = _graphs(lm, pool, recorder)
    slices = _prefill(lm, pool, [3] * 5)
    lm.forward(_decode(lm, slices), pool)  # five sequences, the largest bucket holds four
    image = _decode(lm, slices[:1], lm.spec.image_token_id)
    assert lm.forward(image, pool).isfinite().all()
    lm.forward(_decode(lm, slices[:1]), KvPool(lm.kv_layout, BLOCKS))  # another pool
    assert not any(graph.replays for graph in recorder.graphs)
    lm.forward(_decode(lm, slices[:1]), pool)
    assert sum(graph.replays for graph in recorder.graphs) == 1


def test_all_graphs_are_captured_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else none could use the memory that another let go of."""
    used: list[tuple[Any, Any]] = []

    @contextmanager
    def graph(made: Any, *, pool: Any, stream: Any) -> Iterator[None]:
        used.append((pool, stream))
        yield

    for name in ("Stream", "CUDAGraph", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock(side_effect=lambda *_: MagicMock()))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    capture = CudaCapture()
    graphs: list[Any] = [capture(lambda: torch.ones(1))[0] for _ in range(3)]
    assert [pool for pool, _ in used] == [None, *(made.pool() for made in graphs[:2])]
    assert len({id(stream) for _, stream in used}) == 1


class _Shapes:
    """Attention of right shapes that computes nothing."""

    def tables(self, pool: KvPool, sequences: object) -> None: ...

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


class _HostTensors(TorchDispatchMode):
    """Which operations had to do with a tensor of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, out))
        if any(isinstance(x, Tensor) and x.device.type == "cpu" for x in leaves):
            self.found.add(str(function))
        return out


def _step_without_content(
    lm: LanguageModel, change: Callable[[Tensor], Tensor] = lambda x: x
) -> set[str]:
    """A decode forward on tensors and weights without content, of a device that isn't the
    host: looking at a number raises, tensors of the host are found."""
    pool = KvPool(lm.kv_layout, 2)
    step = AttentionStep(pool, (), exact=False, kernel=_Shapes())
    model = lm.model.to("meta")
    rows = 4 if hasattr(model.base_model, "get_rope_index") else 1
    ids = torch.zeros(3, dtype=torch.int64, device="meta")
    positions = torch.zeros(rows, 3, dtype=torch.int64, device="meta")
    select = torch.arange(3, device="meta")
    with _HostTensors() as host, torch.inference_mode():
        logits = lm._run(change(ids), positions, select, step)
    assert logits.shape == (3, lm.spec.vocab_size)
    return host.found


@pytest.mark.parametrize("family", FAMILIES)
def test_no_decode_step_waits_for_the_device_or_the_host(
    family: str, tiny_checkpoint: Callable[..., Path]
) -> None:
    """What a CUDA graph can't hold."""
    lm = LanguageModel.load(tiny_checkpoint(family), kernels="off")
    assert _step_without_content(lm) == set()


def test_the_test_above_can_fail(tiny_checkpoint: Callable[..., Path]) -> None:
    lm = LanguageModel.load(tiny_checkpoint("qwen3_vl"), kernels="off")
    with pytest.raises(RuntimeError, match="meta tensors"):
        _step_without_content(lm, lambda ids: ids + int(ids.sum()))
    assert _step_without_content(lm, lambda ids: ids + torch.ones(3).to(ids))


def test_a_process_has_one_device() -> None:
    """Each thread has a current one of its own, the first: kernels would start there."""
    with pytest.raises(EpdError, match="CUDA_VISIBLE_DEVICES"):
        usable_device("cuda:1")
    assert usable_device("cpu").type == "cpu"
