"""Decode steps as CUDA graphs: one launch in place of hundreds.

A graph replays the same kernels over the same memory, so each size of batch (a *bucket*)
has buffers of its own that stay where they are; a step fills them and replays. Rows that
only fill up a bucket read and write the pool's spare block. What doesn't fit a bucket
runs as it would without graphs: prompts, placeholder ids that were generated, exact mode.

Shapes: B sequences of a bucket, one token each; P position rows; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from epd.kv.pool import KvPool
from epd.models.attention import AttentionStep
from epd.models.batch import SequenceSlice
from epd.models.gpu.attention import DeviceAttention
from epd.models.gpu.tables import StepTensors, pack, step_shape

Forward = Callable[[Tensor, Tensor, Tensor, AttentionStep], Tensor]
"""(ids [B], positions [P, B], rows wanted [B], step) to logits [B, V]; on the device."""


class Graph(Protocol):
    """What `torch.cuda.CUDAGraph` is used for."""

    def replay(self) -> None: ...


Capture = Callable[[Callable[[], Tensor]], tuple[Graph, Tensor]]
"""(the graph of a function, where each replay leaves its result)."""


def buckets(most: int) -> list[int]:
    """Sizes up to `most`: small ones close together, since their steps are short."""
    sizes = [size for size in (1, 2, 4, *range(8, most, 8)) if size < most]
    return [*sizes, most]


def bucket_for(count: int, sizes: Sequence[int]) -> int | None:
    """The smallest size that holds `count` sequences."""
    return next((size for size in sizes if size >= count), None)


@dataclass
class _Bucket:
    """Buffers that a graph reads, and where it leaves logits."""

    ids_B: Tensor
    positions_PB: Tensor
    tables: StepTensors
    graph: Graph
    logits_BV: Tensor


class DecodeGraphs:
    """Graphs over one pool, captured when they are made: seconds, and a little memory.

    The pool needs a spare block. One thread at a time may call `run`.
    """

    def __init__(
        self,
        forward: Forward,
        kernel: DeviceAttention,
        pool: KvPool,
        *,
        sizes: Sequence[int],
        position_rows: int,
        max_context: int,
        capture: Capture | None = None,
    ) -> None:
        self._forward = forward
        self._kernel = kernel
        self.pool = pool
        self._rows = position_rows
        self._width = min(pool.layout.blocks_for(max_context), pool.num_blocks)
        self._filler = SequenceSlice(1, 1, [pool.num_blocks])
        capture = capture or CudaCapture()
        # The largest first: the smaller ones then fit into the memory that it left.
        self._buckets = {size: self._make(size, capture) for size in sorted(sizes, reverse=True)}
        self._sizes = sorted(sizes)

    def run(
        self, ids: Tensor, positions: Tensor, sequences: Sequence[SequenceSlice]
    ) -> Tensor | None:
        """Logits [n, V] of n sequences with one token each; None where no bucket fits.

        ids [n], positions [P, n]: on the host.
        """
        size = bucket_for(len(sequences), self._sizes)
        most = self._width * self.pool.layout.block_tokens
        if size is None or any(s.query_len > 1 or s.kv_len > most for s in sequences):
            return None
        bucket = self._buckets[size]
        lacking = size - len(sequences)
        bucket.ids_B.copy_(F.pad(ids, (0, lacking)), non_blocking=True)
        bucket.positions_PB.copy_(F.pad(positions, (0, lacking)), non_blocking=True)
        buffer = self._packed([*sequences, *[self._filler] * lacking])[1]
        bucket.tables.buffer.copy_(buffer, non_blocking=True)
        bucket.graph.replay()
        return bucket.logits_BV[: len(sequences)].clone()

    def _packed(self, sequences: Sequence[SequenceSlice]) -> tuple[Any, Tensor]:
        layout = self.pool.layout
        shape = step_shape(layout, sequences, self._kernel.share, self._width)
        return shape, pack(layout, sequences, shape, pinned=self.pool.device.type == "cuda")

    def _make(self, size: int, capture: Capture) -> _Bucket:
        device = self.pool.device
        ids = torch.zeros(size, dtype=torch.int64, device=device)
        positions = torch.zeros(self._rows, size, dtype=torch.int64, device=device)
        rows = torch.arange(size, device=device)
        shape, buffer = self._packed([self._filler] * size)
        tables = StepTensors(shape, buffer.to(device))
        step = AttentionStep(self.pool, (), exact=False, kernel=_Fixed(self._kernel, tables))
        graph, logits = capture(lambda: self._forward(ids, positions, rows, step))
        return _Bucket(ids, positions, tables, graph, logits)


class _Fixed:
    """A kernel whose tables are there already."""

    def __init__(self, kernel: DeviceAttention, tables: StepTensors) -> None:
        self._kernel = kernel
        self._tables = tables

    def tables(self, pool: KvPool, sequences: Sequence[SequenceSlice]) -> StepTensors:
        return self._tables

    def __call__(self, *args: Any) -> Tensor:
        return self._kernel(*args)


class CudaCapture:
    """Captures on a stream of its own; graphs share their memory, since one runs at a time.

    All on the same stream: torch gives memory that one stream let go of to no other.
    """

    def __init__(self) -> None:
        self._memory: Any = None
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels are compiled and chosen before
            function()
            function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, stream=stream):
            result = function()
        self._memory = graph.pool()
        return graph, result
