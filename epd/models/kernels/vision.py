"""A whole layer of a vision tower in one call.

As with decoder layers (`epd.models.kernels.layer`), what a layer is is not read from a
model's name: its parts must be those that the kernel knows and no others, its activation
must be one of the kernel's as a function, and then kernel and layer must agree on random
numbers. A layer that fails any keeps its own forward, on packed weights and the dense
attention kernel.

Shapes: T rows of a flattened batch; B pictures or tiles; D head size.
"""

from __future__ import annotations

import ctypes
import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import Any, Final

import torch
from torch import Tensor, nn

from epd.models.kernels.build import Library
from epd.models.kernels.dense import Starts
from epd.models.kernels.linear import PackedLinear
from epd.models.kernels.parts import epsilon_of, has_parameters

logger = logging.getLogger(__name__)

_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "q": ("attn.qkv", "self_attn.q_proj"),
    "k": ("self_attn.k_proj",),
    "v": ("self_attn.v_proj",),
    "o": ("attn.proj", "self_attn.out_proj"),
    "gate": ("mlp.gate_proj",),
    "up": ("mlp.up_proj", "mlp.fc1", "mlp.linear_fc1"),
    "down": ("mlp.down_proj", "mlp.fc2", "mlp.linear_fc2"),
    "outer": ("norm1", "layer_norm1"),
    "inner": ("norm2", "layer_norm2"),
}
_LINEARS: Final[Sequence[str]] = ("q", "k", "v", "o", "gate", "up", "down")
_NORMS: Final[Sequence[str]] = ("outer", "inner")
_OPTIONAL: Final = frozenset({"k", "v", "gate"})

_PROBE_STARTS: Final = (0, 9, 24)
_TOLERANCE: Final = 0.02
"""Of the largest change: a few roundings to bfloat16."""


def _gelu_tanh(x: Tensor) -> Tensor:
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


_ACTIVATIONS: Final[Sequence[Callable[[Tensor], Tensor]]] = (
    lambda x: x * torch.sigmoid(x),
    lambda x: x * torch.sigmoid(1.702 * x),
    _gelu_tanh,
)
"""In the order of `Activation` of vision.cpp."""
_SILU: Final = 0


class _Weights(ctypes.Structure):
    """`Weights` of vision.cpp."""

    _fields_ = (
        *((f"{name}_{part}", c_void_p) for name in _LINEARS for part in ("weight", "bias")),
        *(
            (f"{name}_{part}", kind)
            for name in _NORMS
            for part, kind in (("weight", c_void_p), ("bias", c_void_p), ("epsilon", c_float))
        ),
        *((name, c_int64) for name in ("hidden", "wide", "heads", "d", "activation")),
        ("scale", c_float),
    )


class FusedVisionLayer:
    """`forward` of a vision tower's layer: hidden states [T, hidden] or [B, T, hidden]."""

    def __init__(
        self, library: Library, layer: nn.Module, parts: Mapping[str, Any], threads: int
    ) -> None:
        self._threads = threads
        self._run = library.handle.epd_vision_layer
        self._run.argtypes = (*(c_void_p,) * 2, c_int64, *(c_void_p,) * 4, c_int)
        self._run.restype = None
        self._parts = parts  # what must stay alive
        self._own = layer.forward
        self.struct = _weights(layer, parts)
        self._at = ctypes.addressof(self.struct)

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **options: Any,
    ) -> Any:
        x = hidden_states
        if attention_mask is not None:  # a padded batch
            return self._own(x, attention_mask, **options)
        if cu_seqlens is None:
            assert position_embeddings is None
            starts = Starts(range(0, x.shape[0] * x.shape[1] + 1, x.shape[1]))
        else:
            starts = Starts(cu_seqlens.tolist())
        assert x.dtype is torch.bfloat16
        assert x.numel() == starts.rows * self.struct.hidden
        x = x.contiguous()
        around = [part.float().contiguous() for part in position_embeddings or ()]
        assert all(part.shape == (starts.rows, self.struct.d) for part in around)
        cos, sin = (part.data_ptr() for part in around) if around else (None, None)
        out = torch.empty_like(x)
        where = (starts.address, starts.count, x.data_ptr(), cos, sin, out.data_ptr())
        self._run(self._at, *where, self._threads)
        return out


def fuse_vision_layers(model: nn.Module, library: Library, threads: int) -> int:
    """Let the layers of a packed tower run fused where that is proven; how many do."""
    stacks = [stack for stack in model.modules() if isinstance(stack, nn.ModuleList)]
    layers: list[Any] = [layer for stack in stacks for layer in stack]
    count = 0
    for layer in layers:
        parts = _parts(layer)
        if parts is None:
            continue
        fused = FusedVisionLayer(library, layer, parts, threads)
        if _agree(layer, fused):
            layer.forward = fused
            count += 1
    logger.info("%d layers of the vision tower run fused", count)
    return count


@torch.inference_mode()
def _agree(layer: nn.Module, fused: FusedVisionLayer) -> bool:
    """Whether both make the same of random rows, of two sequences.

    The rows are small, so that what the layer adds to them is most of the result.
    """
    generator = torch.Generator().manual_seed(0)
    rows, d = _PROBE_STARTS[-1], fused.struct.d
    x = (torch.randn(rows, fused.struct.hidden, generator=generator) / 64).bfloat16()
    options: dict[str, Any] = {}
    if "cu_seqlens" in inspect.signature(layer.forward).parameters:
        angle = torch.randn(rows, d // 2, generator=generator).repeat(1, 2)
        options["position_embeddings"] = (angle.cos(), angle.sin())
        options["cu_seqlens"] = torch.tensor(_PROBE_STARTS, dtype=torch.int32)
    else:
        x, options["attention_mask"] = x.view(2, rows // 2, -1), None
    wanted = layer(x, **options)
    if not isinstance(wanted, Tensor):
        return False
    error = (fused(x, **options).float() - wanted.float()).abs()
    change = (wanted.float() - x.float()).abs()
    return bool(error.max() <= _TOLERANCE * change.max())


def _parts(layer: nn.Module) -> dict[str, Any] | None:
    """By role, or None if the layer is not of the kind that the kernel knows."""
    found = {path: part for path, part in layer.named_modules() if has_parameters(part)}
    parts: dict[str, Any] = {}
    for role, names in _NAMES.items():
        here = [found.pop(path) for path in names if path in found]
        if len(here) > 1 or (not here and role not in _OPTIONAL):
            return None
        if here:
            parts[role] = here[0]
    linears = {role: parts[role].forward for role in _LINEARS if role in parts}
    if found or not all(isinstance(linear, PackedLinear) for linear in linears.values()):
        return None
    known = _shapes_fit(layer, linears) and all(_norm_fits(parts[name]) for name in _NORMS)
    how = _activation(layer)
    return parts if known and how is not None and (how == _SILU or "gate" not in parts) else None


def _shapes_fit(layer: nn.Module, linears: Mapping[str, PackedLinear]) -> bool:
    heads = getattr(_attention(layer), "num_heads", 0)
    hidden, size, wide = linears["o"].n, linears["o"].k, linears["up"].n
    one = "k" not in linears
    shapes = dict.fromkeys(("k", "v"), (hidden, size))
    shapes |= {"q": (hidden, 3 * size if one else size), "o": (size, hidden)}
    shapes |= {"gate": (hidden, wide), "up": (hidden, wide), "down": (wide, hidden)}
    fit = all((linear.k, linear.n) == shapes[role] for role, linear in linears.items())
    return fit and one == ("v" not in linears) and heads > 0 and size % heads == 0


def _norm_fits(norm: nn.Module) -> bool:
    """LayerNorm with a bias, or RMSNorm; what it computes is for `_agree` to find out."""
    tensors = list(norm.parameters())
    biased = isinstance(norm, nn.LayerNorm) and norm.bias is not None
    kinds = all(t.dtype is torch.bfloat16 and t.is_contiguous() for t in tensors)
    return kinds and len(tensors) == 1 + biased and epsilon_of(norm) is not None


def _attention(layer: Any) -> Any:
    return getattr(layer, "attn", None) or layer.self_attn


def _scale(layer: nn.Module) -> float:
    attention = _attention(layer)
    given = getattr(attention, "scaling", getattr(attention, "scale", None))
    return given if isinstance(given, float) else 0.0


def _activation(layer: Any) -> int | None:
    """Which of the kernel's it is, by its values."""
    own = [child for child in layer.mlp.children() if not has_parameters(child)]
    if len(own) != 1:
        return None
    x = torch.linspace(-9, 9, 361, dtype=torch.float64)
    y = own[0](x)
    fits = [torch.allclose(y, known(x), rtol=0, atol=1e-6) for known in _ACTIVATIONS]
    return fits.index(True) if any(fits) else None


def _weights(layer: nn.Module, parts: Mapping[str, Any]) -> _Weights:
    struct = _Weights()
    for role in _LINEARS:
        if role in parts:
            setattr(struct, f"{role}_weight", parts[role].forward.weight_at)
            setattr(struct, f"{role}_bias", parts[role].forward.bias_at)
    for role in _NORMS:
        bias = getattr(parts[role], "bias", None)
        setattr(struct, f"{role}_weight", parts[role].weight.data_ptr())
        setattr(struct, f"{role}_bias", None if bias is None else bias.data_ptr())
        setattr(struct, f"{role}_epsilon", epsilon_of(parts[role]))
    output = parts["o"].forward
    struct.heads = _attention(layer).num_heads
    struct.hidden, struct.d, struct.wide = output.n, output.k // struct.heads, parts["up"].forward.n
    struct.activation, struct.scale = _activation(layer), _scale(layer)
    return struct
