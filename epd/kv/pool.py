"""The memory of a worker's KV cache: one buffer, registered once.

The pool owns its memory for as long as it lives and never moves it; the transfer
engine registers `address(0)` .. `+ nbytes`. On a device that is a mirror in pinned host
memory (`epd.kv.mirror`): `to_peers` and `from_peers` carry blocks between the two, and
are nothing where the pool itself is host memory. Which block belongs to whom is
`epd.kv.blocks`' business.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from epd.kv.layout import KvLayout, LayerShape
from epd.kv.mirror import HostMirror
from epd.pages import touched


class KvPool:
    """`num_blocks` blocks of `layout` on `device`.

    CPU memory is in large pages (`epd.pages`) and written once here, so that the process's
    resident size is what it will be under load and no first request pays for page faults.
    Zeros, too: bytes that were never written are finite numbers.

    `mirrored`: see above; None: on every device but the CPU. `spare` blocks more lie
    behind the last, for rows that only fill up a batch (`epd.models.gpu.graphs`); peers
    don't see them. None: one, on every device but the CPU.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        device: str | torch.device = "cpu",
        *,
        mirrored: bool | None = None,
        spare: int | None = None,
    ) -> None:
        assert num_blocks > 0
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = torch.device(device)
        self.nbytes = num_blocks * layout.block_bytes
        on_host = self.device.type == "cpu"
        self._places = num_blocks + (int(not on_host) if spare is None else spare)
        whole = self._places * layout.block_bytes
        if on_host:
            everything = touched(whole)
        else:
            everything = torch.zeros(whole, dtype=torch.uint8, device=self.device)
        self.bytes = everything[: self.nbytes].view(num_blocks, layout.block_bytes)
        """[num_blocks, block_bytes] uint8, contiguous."""
        staged = not on_host if mirrored is None else mirrored
        self._mirror = HostMirror(self.bytes) if staged else None
        self._elements = everything.view(getattr(torch, layout.dtype))
        self._k = [self._view(layout.k_offset(i), s.heads, s.k_dim) for i, s in self._layers]
        self._v = [self._view(layout.v_offset(i), s.heads, s.v_dim) for i, s in self._layers]

    @property
    def _layers(self) -> list[tuple[int, LayerShape]]:
        return list(enumerate(self.layout.layers))

    def _view(self, offset: int, heads: int, dim: int) -> Tensor:
        tokens = self.layout.block_tokens
        size = (self._places, tokens, heads, dim)
        stride = (self.layout.block_elements, heads * dim, dim, 1)
        return self._elements.as_strided(size, stride, self._elements.storage_offset() + offset)

    def k(self, layer: int) -> Tensor:
        """Keys, [num_blocks + spare, block_tokens, heads, k_dim]; a view, strided by block."""
        return self._k[layer]

    def v(self, layer: int) -> Tensor:
        """Values, [num_blocks + spare, block_tokens, heads, v_dim]; a view, strided by block."""
        return self._v[layer]

    @property
    def mirrored(self) -> bool:
        """Whether peers and model see different memory."""
        return self._mirror is not None

    @property
    def peers_bytes(self) -> Tensor:
        """[num_blocks, block_bytes] uint8 on the host: what peers read, and reads fill."""
        return self.bytes if self._mirror is None else self._mirror.bytes

    def address(self, block: int) -> int:
        """Where the block starts for peers, for transfer descriptors."""
        assert 0 <= block < self.num_blocks
        return self.peers_bytes.data_ptr() + block * self.layout.block_bytes

    def block_bytes_view(self, block: int) -> Tensor:
        """The block's bytes as peers see them, [block_bytes] uint8; a view."""
        assert 0 <= block < self.num_blocks
        return self.peers_bytes[block]

    def to_peers(self, blocks: Sequence[int]) -> None:
        """Before blocks are summed and announced: let peers see what was computed."""
        if self._mirror is not None:
            self._mirror.to_host(blocks)

    def from_peers(self, blocks: Sequence[int]) -> None:
        """Before blocks that were read are used: let the model see them."""
        if self._mirror is not None:
            self._mirror.to_device(blocks)

    def copy(self, source: int, target: int) -> None:
        """All bytes of a sealed block into another, where the model computes, and they are
        there. With a mirror from its memory: a copy on the device would wait behind the
        running step, and the source may be free, and be read into, before its turn comes."""
        if self._mirror is None:
            self.bytes[target].copy_(self.bytes[source])
        else:
            self._mirror.bytes[target].copy_(self._mirror.bytes[source])
            self._mirror.to_device([target])

    def block_at(self, address: int) -> int | None:
        """The block that starts there for peers; None: no block does."""
        block, rest = divmod(address - self.address(0), self.layout.block_bytes)
        return block if not rest and 0 <= block < self.num_blocks else None

    def zero_tail(self, block: int, from_token: int) -> None:
        """Clear the places from `from_token` on, in every layer.

        A sealed last block then has the same bytes, and the same checksum, whatever
        was in it before.
        """
        assert 0 <= from_token <= self.layout.block_tokens
        for keys, values in zip(self._k, self._v, strict=True):
            keys[block, from_token:] = 0
            values[block, from_token:] = 0
