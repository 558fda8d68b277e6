"""Decode beside memory bandwidth, prefill and encode beside a bare GEMM.

- *read*: a kernel that reads as many bytes as the linear layers' weights have, from memory
  of the same kind, with the same threads, and does nothing else.
- *GEMM*: a large matrix product by torch in the model's dtype.
- *decode B*: a step of B sequences, one token each, with logits of every row.
- *prefill*, *encode*: their own floating-point operations a second, beside the GEMM's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from PIL import Image
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from epd.bench.stage.case import Case
from epd.kv.pool import KvPool
from epd.models.encoder import VisionEncoder
from epd.models.kernels import build
from epd.models.kernels.linear import LinearKernel
from epd.models.lm import DecodeRow, ForwardBatch, LanguageModel, SequenceSlice
from epd.models.processor import PreparedImage, Processor
from epd.models.quantize import GROUP
from epd.pages import untouched

Kernels = Literal["auto", "off"]
BATCHES = (1, 4, 8, 16)
GEMM_SIDE = 1536


@dataclass(frozen=True, slots=True)
class Sizes:
    context: int = 256
    """Tokens that each decoding sequence has already."""
    chunk: int = 512
    """Tokens of one prefill forward."""
    side: int = 448
    """Of the picture, in pixels."""


def read_case(lm: LanguageModel, threads: int) -> Case:
    """Reads as many bytes as the weights of the linear layers have, as they are kept."""
    itemsize = getattr(torch, lm.spec.dtype).itemsize
    each = itemsize if lm.quantize == "off" else 1 + itemsize / GROUP  # a scale for each group
    # Not the tensors' own sizes: what was packed has let go of them.
    count = sum(linear.in_features * linear.out_features for linear in _linears(lm))
    return reading(int(count * each), threads)


def reading(nbytes: int, threads: int) -> Case:
    """Reads so many bytes from memory once, as fast as these threads can."""
    memory = untouched(nbytes // 64 * 64).fill_(1)
    library = build.load()
    run: Callable[[], object] = memory.view(torch.int64).sum
    if library is not None:
        run = partial(LinearKernel(library, threads).read, memory)
    return Case(f"read {nbytes / 2**20:.0f} MiB", run)


def gemm_case(lm: LanguageModel) -> Case:
    return gemm_of(getattr(torch, lm.spec.dtype))


def gemm_of(dtype: torch.dtype) -> Case:
    """A large matrix product by torch, with the threads that it is set to."""
    a, b = (torch.randn(GEMM_SIDE, GEMM_SIDE, dtype=dtype) for _ in range(2))
    product = partial(torch.matmul, a, b)
    return Case(f"GEMM {GEMM_SIDE}", product, 2 * GEMM_SIDE**3, "Gflop/s")


def language_cases(
    lm: LanguageModel, sizes: Sizes, read: Case, gemm: Case, suffix: str = ""
) -> list[Case]:
    tokens = max(BATCHES) * (sizes.context + 32) + sizes.chunk + 32
    pool = KvPool(lm.kv_layout, lm.kv_layout.blocks_for(tokens))
    cases = []
    run: Callable[[], object]
    for count in BATCHES:
        run = partial(lm.decode, decode_rows(lm, count, sizes.context), pool)
        cases.append(Case(f"decode {count}{suffix}", run, base=read))
    run, flops = partial(lm.forward, chunk(lm, sizes.chunk), pool), prefill_flops(lm, sizes.chunk)
    return [*cases, Case(f"prefill {sizes.chunk}{suffix}", run, flops, "Gflop/s", gemm)]


def encode_case(checkpoint: str, threads: int, sizes: Sizes, gemm: Case, kernels: Kernels) -> Case:
    """One picture of noise; its operations are counted on a copy without our kernels."""
    encoder = VisionEncoder.load(checkpoint, threads=threads, kernels=kernels)
    side = sizes.side
    noise = torch.randint(0, 256, (side, side, 3), dtype=torch.uint8).numpy()
    image = Processor.load(checkpoint).prepare(Image.fromarray(noise), 1)
    name = f"encode {side} x {side}" + ("" if kernels == "auto" else ", kernels off")
    flops = encode_flops(checkpoint, threads, image)
    return Case(name, partial(encoder.encode, [image]), flops, "Gflop/s", gemm)


def decode_rows(lm: LanguageModel, count: int, context: int) -> list[DecodeRow]:
    """One new token of each of `count` sequences."""
    each = lm.kv_layout.blocks_for(context)
    return [DecodeRow(i + 10, context, 0, range(i * each, (i + 1) * each)) for i in range(count)]


def chunk(lm: LanguageModel, n: int, end: int | None = None) -> ForwardBatch:
    """The `n` tokens of a prompt that end at `end`; logits of the last."""
    end = end or n
    blocks = range(lm.kv_layout.blocks_for(end))
    ids = torch.randint(10, 1000, (n,))
    sequence = SequenceSlice(n, end, blocks)
    return ForwardBatch(ids, lm.continuation(end - n, n, 0), [sequence], [n - 1])


def prefill_flops(lm: LanguageModel, n: int) -> float:
    """Of the linear layers (the head for one row), and of causal attention."""
    config, head = lm.model.config.get_text_config(), lm.model.get_output_embeddings()
    each = [(linear.in_features * linear.out_features, linear is head) for linear in _linears(lm)]
    linear = sum(2 * size * (1 if last else n) for size, last in each)
    dim = lm.kv_layout.layers[0].k_dim
    attention = 4 * n * (n + 1) / 2 * config.num_attention_heads * dim * config.num_hidden_layers
    return float(linear + attention)


def _linears(lm: LanguageModel) -> list[nn.Linear]:
    return [module for module in lm.model.modules() if isinstance(module, nn.Linear)]


def encode_flops(checkpoint: str, threads: int, image: PreparedImage) -> float:
    """Counted in plain products: the counter doesn't know fused attention on CPUs."""
    encoder = VisionEncoder.load(checkpoint, threads=threads, kernels="off")
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        encoder.encode([image])
    return float(counter.get_total_flops())
