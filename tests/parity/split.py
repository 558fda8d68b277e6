"""Encode, prefill and decode as separate models with separate pools, in one process.

The only things that pass from part to part are the bytes that pass between the real
processes: embedding rows, and the blocks of one request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from epd.jobs import ImageItem
from epd.kv.blocks import BlockAllocator
from epd.kv.pool import KvPool
from epd.models.encoder import VisionEncoder
from epd.models.lm import ForwardBatch, LanguageModel, SequenceSlice
from epd.models.processor import Processor

WHOLE = 1 << 20
"""A chunk larger than every prompt."""


def pictures(count: int, seed: int = 0) -> list[Image.Image]:
    """Noise pictures, each of another size and shape."""
    random = np.random.default_rng(seed)
    sizes = [(40, 72), (64, 48), (50, 50), (36, 90), (72, 33)]
    shapes = [sizes[(seed + i) % len(sizes)] for i in range(count)]
    return [Image.fromarray(random.integers(0, 256, (*hw, 3), dtype=np.uint8)) for hw in shapes]


@dataclass
class Request:
    """A prompt, what it will be given next (teacher forcing), and what came out."""

    prompt_ids: list[int]
    items: list[ImageItem]
    rows: Tensor | None
    """[planes, R, hidden] of all its images in placeholder order."""
    forced_ids: list[int]
    logits: list[Tensor] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    positions: Tensor = field(default_factory=lambda: torch.empty(0))
    delta: int = 0

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.forced_ids


class Worker:
    """One language model with its pool: a prefill or a decode process without RPC."""

    def __init__(
        self,
        path: Path,
        *,
        dtype: str = "auto",
        exact: bool = False,
        block_tokens: int = 16,
        kernels: Literal["auto", "off"] = "auto",
        device: str = "cpu",
    ) -> None:
        self.lm = LanguageModel.load(
            path,
            dtype=dtype,
            device=device,
            exact=exact,
            block_tokens=block_tokens,
            kernels=kernels,
        )
        self.pool = KvPool(self.lm.kv_layout, 400, device)
        self.allocator = BlockAllocator(400)

    def step(self, work: Sequence[tuple[Request, int]]) -> list[Tensor]:
        """One forward over the next n tokens of each request; logits of all their rows."""
        ids, positions, sequences, rows = [], [], [], []
        for request, n in work:
            start, end = request.computed, request.computed + n
            lacking = self.lm.kv_layout.blocks_for(end) - len(request.blocks)
            request.blocks += self.allocator.allocate(lacking)
            chunk = torch.tensor(request.token_ids[start:end])
            images = self._image_rows(request, start, end)
            ids.append(chunk)
            positions.append(request.positions[:, start:end])
            sequences.append(SequenceSlice(n, end, request.blocks, images.stop - images.start))
            if request.rows is not None:
                rows.append(request.rows[:, images])
            request.computed = end
        total = sum(n for _, n in work)
        batch = ForwardBatch(
            torch.cat(ids), torch.cat(positions, 1), sequences, range(total), rows or None
        )
        logits = self.lm.forward(batch, self.pool)
        # torch.split, not the method: that one has no types in torch.
        return list(torch.split(logits, [n for _, n in work]))

    def _image_rows(self, request: Request, start: int, end: int) -> slice:
        image, prompt = self.lm.spec.image_token_id, len(request.prompt_ids)
        before = request.token_ids[: min(start, prompt)].count(image)
        return slice(before, request.token_ids[: min(end, prompt)].count(image))

    def free(self, request: Request) -> None:
        self.allocator.free(request.blocks)
        request.blocks = []
        self.allocator.check_integrity()


class Encoding:
    """Processor and vision tower: an encode process without RPC."""

    def __init__(self, path: Path, dtype: str, device: str = "cpu", *, exact: bool) -> None:
        self.processor = Processor.load(path)
        self._encoder = VisionEncoder.load(path, dtype, device, exact=exact)

    def request(
        self,
        lm: LanguageModel,
        prompt_ids: list[int],
        images: Sequence[Image.Image],
        forced_ids: list[int],
    ) -> Request:
        """With all that `lm` needs for it: its images are encoded."""
        prepared = [self.processor.prepare(image, len(images)) for image in images]
        items = [
            ImageItem(i, bytes([i]) * 32, p.rows, p.grid, *image.size, len(images))
            for i, (p, image) in enumerate(zip(prepared, images, strict=True))
        ]
        rows = torch.cat(self._encoder.encode(prepared), 1) if images else None
        request = Request(prompt_ids, items, rows, forced_ids)
        request.positions, request.delta = lm.positions(
            torch.tensor(request.token_ids), items, len(prompt_ids)
        )
        return request


class Split:
    """A checkpoint in three parts."""

    def __init__(
        self,
        path: Path,
        *,
        dtype: str = "auto",
        exact: bool = False,
        kernels: Literal["auto", "off"] = "auto",
        device: str = "cpu",
    ) -> None:
        self.encoding = Encoding(path, dtype, device, exact=exact)
        self.prefill, self.decode = (
            Worker(path, dtype=dtype, exact=exact, kernels=kernels, device=device) for _ in "pd"
        )
        self.decode.allocator.free(self.decode.allocator.allocate(7)[::-1])  # other block ids

    def request(
        self, prompt_ids: list[int], images: Sequence[Image.Image], forced_ids: list[int]
    ) -> Request:
        return self.encoding.request(self.prefill.lm, prompt_ids, images, forced_ids)

    def run_prefill(self, requests: Sequence[Request], chunk: int) -> None:
        """Prompts in chunks, all requests in every forward; keeps the last row's logits."""
        while work := [
            (request, min(chunk, len(request.prompt_ids) - request.computed))
            for request in requests
            if request.computed < len(request.prompt_ids)
        ]:
            for (request, _), logits in zip(work, self.prefill.step(work), strict=True):
                if request.computed == len(request.prompt_ids):
                    request.logits.append(logits[-1])

    def hand_over(self, request: Request) -> None:
        """Copy the request's blocks, and nothing else, to the decode worker."""
        source, target = self.prefill.pool, self.decode.pool
        source.zero_tail(request.blocks[-1], (request.computed - 1) % 16 + 1)
        source.to_peers(request.blocks)
        blocks = self.decode.allocator.allocate(len(request.blocks))
        for old, new in zip(request.blocks, blocks, strict=True):
            payload = bytes(source.block_bytes_view(old).numpy())
            view = target.block_bytes_view(new)
            view.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        target.from_peers(blocks)
        self.prefill.free(request)
        request.blocks = blocks

    def run_decode(self, requests: Sequence[Request]) -> None:
        """One token of every unfinished request in each forward."""
        while work := [
            (request, 1) for request in requests if len(request.logits) < len(request.forced_ids)
        ]:
            for (request, _), logits in zip(work, self.decode.step(work), strict=True):
                request.logits.append(logits[-1])

    def run(self, requests: Sequence[Request], chunk: int) -> None:
        self.run_prefill(requests, chunk)
        for request in requests:
            self.hand_over(request)
        self.run_decode(requests)
        for request in requests:
            self.decode.free(request)
        assert self.prefill.allocator.used == self.decode.allocator.used == 0
