"""What the work of a checkpoint should cost: operations and bytes over what the machine can do.

    time = floating-point operations / GEMM rate + bytes / bandwidth

Both rates are measured, with the threads of a stage, in the run that the prediction stands
beside: a large bfloat16 product, and a kernel that only reads. The two parts are added, as a
core in this class of kernels does not hide one behind the other (docs/kernels.md: a decode
step is the read of its weights plus its rows' products). Nothing is fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Model:
    """Of a checkpoint, and of a picture of one size."""

    linear: int
    """Weights in the language model's linear layers, without the head."""
    head: int
    layers: int
    query_width: int
    """Query heads x head dimension, of one layer."""
    kv_width: int
    """Key heads x head dimension, of one layer."""
    itemsize: int
    picture_flops: float
    picture_rows: int

    def prefill_flops(self, start: int, end: int) -> float:
        """Of tokens [start, end) of a prompt: linear layers, causal attention."""
        pairs = (end * (end + 1) - start * (start + 1)) / 2
        return 2.0 * self.linear * (end - start) + self._attention(pairs)

    def decode_flops(self, sequences: int, context: int) -> float:
        """Of one token of each sequence."""
        each = 2.0 * (self.linear + self.head) + self._attention(context)
        return sequences * each

    def _attention(self, pairs: float) -> float:
        """A product with the key and one with the value for each pair of tokens."""
        return 4.0 * pairs * self.query_width * self.layers

    @property
    def weight_bytes(self) -> int:
        return self.linear * self.itemsize

    def kv_bytes(self, tokens: int) -> int:
        return 2 * tokens * self.kv_width * self.layers * self.itemsize


@dataclass(frozen=True, slots=True)
class Machine:
    """What one stage's threads can do, measured."""

    flops: float
    """Floating-point operations a second, of a large product."""
    bytes: float
    """Bytes read a second."""

    def seconds(self, flops: float, nbytes: float) -> float:
        return flops / self.flops + nbytes / self.bytes


@dataclass(frozen=True, slots=True)
class Theory:
    model: Model
    machine: Machine
    chunk: int
    """Tokens of a prefill step."""
    fixed_s: float = 0.0
    """Of a request, whatever its size: measured with the shortest one."""

    def prompt(self, tokens: int) -> float:
        """TTFT of a prompt without pictures."""
        return self.fixed_s + self._prefill(0, tokens)

    def _prefill(self, start: int, end: int) -> float:
        """Chunk by chunk: each reads the weights once, and the keys and values before it."""
        model, total = self.model, 0.0
        for first in range(start, end, self.chunk):
            stop = min(first + self.chunk, end)
            nbytes = model.weight_bytes + model.kv_bytes(stop)
            total += self.machine.seconds(model.prefill_flops(first, stop), nbytes)
        head = 2.0 * model.head
        return total + self.machine.seconds(head, model.head * model.itemsize)

    def pictures(self, count: int, before: int, after: int) -> float:
        """TTFT of a prompt of words, pictures, words: pictures are encoded one after
        another on a core of their own, each one's rows are computed when they are there."""
        each = self.model.picture_flops / self.machine.flops
        end, done = before, self._prefill(0, before) if before else 0.0
        for number in range(1, count + 1):
            start, end = end, end + self.model.picture_rows
            done = max(done, number * each) + self._prefill(start, end)
        return self.fixed_s + done + self._prefill(end, end + after)

    def step(self, sequences: int, context: int) -> float:
        """One decode step: all weights once, everybody's keys and values."""
        model = self.model
        weights = model.weight_bytes + model.head * model.itemsize
        nbytes = weights + sequences * model.kv_bytes(context)
        return self.machine.seconds(model.decode_flops(sequences, context), nbytes)


def model_of(checkpoint: Path, side: int) -> Model:
    """Counted on the checkpoint's own modules, without weights; the vision tower's
    operations by running it on a picture of noise.

    Raises:
        EpdError: the checkpoint can't be served.
    """
    import torch
    from PIL import Image
    from transformers import AutoConfig, AutoModelForImageTextToText

    from epd.bench.stage.compute import encode_flops
    from epd.models.processor import Processor
    from epd.models.spec import read_spec

    config = AutoConfig.from_pretrained(checkpoint)
    with torch.device("meta"):
        empty: Any = AutoModelForImageTextToText.from_config(config)
    text = config.get_text_config()
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    noise = torch.randint(0, 256, (side, side, 3), dtype=torch.uint8).numpy()
    picture = Processor.load(checkpoint).prepare(Image.fromarray(noise), 1)
    return Model(
        linear=_weights(empty.get_decoder()),
        head=empty.get_output_embeddings().weight.numel(),
        layers=text.num_hidden_layers,
        query_width=text.num_attention_heads * width,
        kv_width=text.num_key_value_heads * width,
        itemsize=getattr(torch, read_spec(checkpoint).dtype).itemsize,
        picture_flops=encode_flops(str(checkpoint), 1, picture),
        picture_rows=picture.rows,
    )


def _weights(module: Any) -> int:
    from torch import nn

    return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))


def measured(dtype: str, nbytes: int, rounds: int = 5) -> Machine:
    """With one thread: the best rate of each (other work only slows down)."""
    import torch

    from epd.bench.stage.compute import gemm_of, reading

    torch.set_num_threads(1)
    product, read = gemm_of(getattr(torch, dtype)), reading(nbytes, 1)
    for case in (product, read):
        case.run()
        for _ in range(rounds):
            case.once()
    return Machine(product.work / min(product.wall), nbytes / min(read.wall))


def exponent(sizes: Sequence[float], times: Sequence[float]) -> float:
    """Slope of the least squares line through the logarithms; needs two sizes."""
    import math

    xs, ys = [math.log(size) for size in sizes], [math.log(time) for time in times]
    x0, y0 = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - x0) * (y - y0) for x, y in zip(xs, ys, strict=True)) / sum(
        (x - x0) ** 2 for x in xs
    )
