"""A whole decoder layer in one call, where the layer is of the Llama kind.

Whether it is, is not read from a name: the parts must be those that the kernel knows
and no others, and then kernel and layer must agree on random numbers. A layer that
fails either keeps its own forward, on packed weights and the attention kernel.

Shapes: T rows of a flattened batch.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import Any, Final

import torch
from torch import Tensor, nn

from epd.kv.layout import KvLayout, LayerShape
from epd.kv.pool import KvPool
from epd.models.attention import plan_step
from epd.models.batch import SequenceSlice
from epd.models.kernels.attention import AttentionKernel
from epd.models.kernels.build import Library
from epd.models.kernels.linear import PackedLinear
from epd.models.kernels.parts import epsilon_of, has_parameters

logger = logging.getLogger(__name__)

_PROJECTIONS: Final = {
    **{f"self_attn.{name}_proj": name for name in "qkvo"},
    **{f"mlp.{name}_proj": name for name in ("gate", "up", "down")},
}
_NORMS: Final = {
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "inner_norm",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
}
_OPTIONAL: Final = frozenset({"self_attn.q_norm", "self_attn.k_norm"})


_PROBE_ROWS: Final = 24
_TOLERANCE: Final = 0.02
"""Of the largest change: a few roundings to bfloat16."""


class _Weights(ctypes.Structure):
    """`Weights` of layer.cpp."""

    _fields_ = (
        *(
            (f"{name}_{part}", c_void_p)
            for name in _PROJECTIONS.values()
            for part in ("weight", "bias")
        ),
        *((name, c_void_p) for name in _NORMS.values()),
        *((name, c_int64) for name in ("hidden", "inner", "heads", "groups", "d", "window")),
        ("format", c_int64),
        *((name, c_float) for name in ("epsilon", "scale")),
    )


class FusedLayer:
    """`forward` of a decoder layer: hidden states [1, T, hidden], bfloat16."""

    def __init__(self, library: Library, layer: Any, threads: int) -> None:
        self._threads = threads
        self._run = library.handle.epd_layer
        pointers, rows = (c_void_p,) * 2, (c_int64,)
        tail = (*(c_void_p,) * 5, c_int64, c_void_p, c_void_p, c_int64, c_int)
        self._run.argtypes, self._run.restype = (*pointers, *rows, *tail), None
        self.index: int = layer.self_attn.layer_idx
        self._owned, self.struct = _weights(layer)
        self.at = ctypes.addressof(self.struct)
        self.last = False
        """Nobody looks at its result but for the rows that the step keeps."""
        self.stack: Callable[..., Tensor] | None = None
        """What it does in place of its own work in a step that asks for it (stack.py)."""

    def __call__(
        self,
        hidden_states: Tensor,
        *args: Any,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        step: Any = None,
        **options: Any,
    ) -> Tensor:
        assert not args, "this model passes something unknown to its layers"
        assert position_embeddings is not None
        assert step is not None, "this model's forward does not pass keywords to its layers"
        cos, sin = position_embeddings
        rows = hidden_states.shape[1]
        kept, count = None, -1
        if step.kept is not None:
            kept, count = step.kept.data_ptr(), len(step.kept)
        assert hidden_states.is_contiguous()
        assert cos.is_contiguous()
        assert sin.is_contiguous()
        assert cos.shape == sin.shape == (1, rows, self.struct.d)
        assert hidden_states.dtype is cos.dtype is sin.dtype is torch.bfloat16
        if step.whole and self.stack is not None:
            return self.stack(hidden_states, cos, sin, step, kept, count)
        if not self.last:
            kept, count = None, -1
        keys, values = step.pool.k(self.index), step.pool.v(self.index)
        assert keys.dtype is torch.bfloat16
        out = torch.empty_like(hidden_states)
        self._run(
            *(self.at, step.tables.address, rows, hidden_states.data_ptr()),
            *(cos.data_ptr(), sin.data_ptr(), keys.data_ptr(), values.data_ptr()),
            *(keys.stride(0), out.data_ptr(), kept, count, self._threads),
        )
        return out


def fuse_layers(decoder: Any, library: Library, threads: int) -> int:
    """Let the layers of a packed model run fused where that is proven; how many do."""
    count = 0
    for layer in decoder.layers:
        if _parts_fit(layer):
            fused = FusedLayer(library, layer, threads)
            if _agree(layer, fused, _Probe(library, threads)):
                layer.forward = fused
                count += 1
    if isinstance(last := decoder.layers[-1].forward, FusedLayer):
        last.last = True
    if count < len(decoder.layers):
        logger.info("%d of %d layers run fused", count, len(decoder.layers))
    return count


class _Probe(AttentionKernel):
    """Remembers what the layer asked of it: scale and window."""

    asked: tuple[float, int | None] | None = None

    def __call__(self, *args: Any) -> Tensor:
        self.asked = args[-2:]
        return super().__call__(*args)


@torch.inference_mode()
def _agree(layer: Any, fused: FusedLayer, probe: _Probe) -> bool:
    """Whether both make the same of random rows; sets the fused one's scale and window.

    The rows are small, so that what the layer adds to them is most of the result.
    """
    generator = torch.Generator().manual_seed(0)
    w, rows = fused.struct, _PROBE_ROWS
    layers = (LayerShape(w.groups, w.d, w.d),) * (fused.index + 1)
    pool = KvPool(KvLayout(_PROBE_ROWS, "bfloat16", layers), 1)
    step = plan_step(pool, [SequenceSlice(rows, rows, [0])], exact=False, kernel=probe)
    x = (torch.randn(1, rows, w.hidden, generator=generator) / 64).bfloat16()
    angle = torch.randn(1, rows, w.d // 2, generator=generator).repeat(1, 1, 2)
    around = (angle.cos().bfloat16(), angle.sin().bfloat16())
    wanted = layer(x, attention_mask=None, position_embeddings=around, step=step)
    if probe.asked is None or not isinstance(wanted, Tensor):
        return False
    w.scale, w.window = probe.asked[0], probe.asked[1] or 0
    found = fused(x, position_embeddings=around, step=step)
    error, change = (found.float() - wanted.float()).abs(), (wanted.float() - x.float()).abs()
    return bool(error.max() <= _TOLERANCE * change.max())


def _parts_fit(layer: nn.Module) -> bool:
    parts = {name: part for name, part in layer.named_modules() if has_parameters(part)}
    if not set(_PROJECTIONS) | set(_NORMS) - _OPTIONAL <= set(parts) <= {*_PROJECTIONS, *_NORMS}:
        return False
    linears = {name: parts[path].forward for path, name in _PROJECTIONS.items()}
    if not all(isinstance(linear, PackedLinear) for linear in linears.values()):
        return False
    d = getattr(layer.self_attn, "head_dim", 0)
    if not d or any(linears[name].n % d for name in "qkv") or linears["k"].n != linears["v"].n:
        return False
    epsilons = {epsilon_of(parts[name]) for name in _NORMS if name in parts}
    return len(epsilons) == 1 and None not in epsilons


def _weights(layer: Any) -> tuple[list[Any], _Weights]:
    """(what must stay alive, the struct)."""
    attention = layer.self_attn
    parts = dict(layer.named_modules())
    linears = {name: parts[path].forward for path, name in _PROJECTIONS.items()}
    norms = {name: parts[path] for path, name in _NORMS.items() if path in parts}
    struct = _Weights()
    for name, linear in linears.items():
        setattr(struct, f"{name}_weight", linear.weight_at)
        setattr(struct, f"{name}_bias", linear.bias_at)
    for name, norm in norms.items():
        setattr(struct, name, norm.weight.data_ptr())
    struct.hidden, struct.inner = linears["q"].k, linears["gate"].n
    struct.d, struct.format = attention.head_dim, linears["q"].format
    struct.heads, struct.groups = linears["q"].n // struct.d, linears["k"].n // struct.d
    struct.epsilon = epsilon_of(layer.input_layernorm)
    return [linears, norms], struct
