"""What the bytes of one KV block are.

Block-major: one block holds its tokens' keys and values of all layers, and is one
contiguous region, so that it is one transfer descriptor:

    block = layer 0: K [block_tokens, heads, k_dim] | V [block_tokens, heads, v_dim]
            layer 1: ...

No padding anywhere. Two workers whose layouts differ never exchange a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LAYOUT_NAME: Final = "kv-block-major/1"

ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Heads and head sizes of one layer's cache, in elements."""

    heads: int
    k_dim: int
    v_dim: int

    @property
    def token_elements(self) -> int:
        return self.heads * (self.k_dim + self.v_dim)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape of a block; derived from the model's config, the same in every worker."""

    block_tokens: int
    dtype: str
    layers: tuple[LayerShape, ...]
    weights: str = ""
    """What the language model's weights were rounded to ("int8"), where they were: such
    keys and values are other numbers. Part of the name, so they never meet the others."""

    def __post_init__(self) -> None:
        assert self.block_tokens > 0
        assert self.dtype in ITEM_BYTES
        assert self.layers

    @property
    def name(self) -> str:
        return f"{LAYOUT_NAME}+{self.weights}" if self.weights else LAYOUT_NAME

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def block_elements(self) -> int:
        return self.block_tokens * sum(layer.token_elements for layer in self.layers)

    @property
    def block_bytes(self) -> int:
        return self.block_elements * self.item_bytes

    @property
    def token_bytes(self) -> int:
        return self.block_bytes // self.block_tokens

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Compared between workers, element by element.

        (layers, K and V, block_tokens, heads, dim) where all layers are alike, else
        block_tokens followed by every layer's (heads, k_dim, v_dim).
        """
        first = self.layers[0]
        if first.k_dim == first.v_dim and all(layer == first for layer in self.layers):
            return (len(self.layers), 2, self.block_tokens, first.heads, first.k_dim)
        sizes = [n for layer in self.layers for n in (layer.heads, layer.k_dim, layer.v_dim)]
        return (self.block_tokens, *sizes)

    def k_offset(self, layer: int) -> int:
        """Elements from the start of the block to this layer's keys."""
        return self.block_tokens * sum(shape.token_elements for shape in self.layers[:layer])

    def v_offset(self, layer: int) -> int:
        """Elements from the start of the block to this layer's values."""
        shape = self.layers[layer]
        return self.k_offset(layer) + self.block_tokens * shape.heads * shape.k_dim

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_tokens)
