"""Block-major memory: views and addresses name the same bytes, without gap or overlap."""

from __future__ import annotations

import ctypes

import pytest
import torch

from epd.kv.layout import KvLayout, LayerShape
from epd.kv.mirror import PAGE_BYTES, runs
from epd.kv.pool import KvPool

UNIFORM = KvLayout(4, "float32", (LayerShape(2, 8, 8),) * 3)
MIXED = KvLayout(4, "bfloat16", (LayerShape(2, 8, 8), LayerShape(1, 16, 4), LayerShape(3, 2, 6)))


def test_sizes_follow_from_the_shapes() -> None:
    assert UNIFORM.block_bytes == 3 * 2 * 4 * 2 * 8 * 4
    assert UNIFORM.token_bytes * UNIFORM.block_tokens == UNIFORM.block_bytes
    assert UNIFORM.block_shape == (3, 2, 4, 2, 8)
    assert MIXED.block_bytes == 4 * (2 * 16 + 20 + 3 * 8) * 2
    assert [UNIFORM.blocks_for(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    "other",
    [
        KvLayout(4, "float32", (LayerShape(2, 8, 8),) * 2),
        KvLayout(8, "float32", (LayerShape(2, 8, 8),) * 3),
        KvLayout(4, "float32", (LayerShape(4, 4, 4),) * 3),
        KvLayout(4, "float32", (LayerShape(2, 8, 6),) * 3),
        KvLayout(4, "float32", (LayerShape(2, 8, 8),) * 2 + (LayerShape(2, 4, 12),)),
    ],
)
def test_different_layouts_have_different_shapes(other: KvLayout) -> None:
    assert other.block_shape != UNIFORM.block_shape


@pytest.mark.parametrize("layout", [UNIFORM, MIXED])
def test_every_byte_of_a_block_belongs_to_one_place(layout: KvLayout) -> None:
    """Each element of each view is written a different number; none is overwritten."""
    pool = KvPool(layout, 3)
    written = 0
    for layer in range(len(layout.layers)):
        for view in (pool.k(layer), pool.v(layer)):
            view[1] = 1
            written += view[1].numel()
            assert int(pool.bytes[1].view(getattr(torch, layout.dtype)).sum()) == written
    assert written == layout.block_elements
    assert not pool.bytes[0].any()
    assert not pool.bytes[2].any()


def test_views_have_the_documented_order() -> None:
    pool = KvPool(MIXED, 2)
    flat = pool.bytes.view(-1).view(torch.bfloat16).view(2, -1)
    flat.copy_(torch.arange(flat.numel()).view(2, -1) % 251)
    start = MIXED.block_tokens * MIXED.layers[0].token_elements
    keys = flat[1, start : start + 4 * 16].view(4, 1, 16)
    assert torch.equal(pool.k(1)[1], keys)
    values = flat[1, start + 4 * 16 : start + 4 * 20].view(4, 1, 4)
    assert torch.equal(pool.v(1)[1], values)


def test_address_is_where_the_bytes_are() -> None:
    pool = KvPool(UNIFORM, 5)
    pool.k(0)[3] = 2.5
    raw = ctypes.string_at(pool.address(3), UNIFORM.block_bytes)
    assert raw == bytes(pool.block_bytes_view(3).numpy())
    assert pool.address(0) % PAGE_BYTES == 0
    assert pool.address(4) - pool.address(3) == UNIFORM.block_bytes
    assert pool.nbytes == 5 * UNIFORM.block_bytes


def test_zero_tail_clears_the_tail_only() -> None:
    pool = KvPool(MIXED, 3)
    pool.bytes.fill_(0x3F)
    pool.zero_tail(1, 3)
    for layer in range(3):
        for view in (pool.k(layer), pool.v(layer)):
            assert view[1, :3].count_nonzero() == view[1, :3].numel()
            assert not view[1, 3:].any()
    assert (pool.bytes[0] == 0x3F).all()
    assert (pool.bytes[2] == 0x3F).all()


def test_memory_is_resident_from_the_start() -> None:
    layout = KvLayout(32, "float32", (LayerShape(8, 64, 64),) * 4)
    pool = KvPool(layout, 64)
    assert pool.nbytes == 32 << 20
    pages = pool.nbytes // PAGE_BYTES
    resident = (ctypes.c_ubyte * pages)()
    address, length = ctypes.c_void_p(pool.address(0)), ctypes.c_size_t(pool.nbytes)
    assert ctypes.CDLL(None, use_errno=True).mincore(address, length, resident) == 0
    assert all(page & 1 for page in resident)


def _mirrored(blocks: int = 6) -> KvPool:
    """As on a device, on the CPU: model and peers see different memory."""
    return KvPool(KvLayout(4, "float32", (LayerShape(2, 3, 3),) * 2), blocks, mirrored=True)


def test_a_mirrored_pool_shows_peers_what_was_sealed_and_nothing_else() -> None:
    pool = _mirrored()
    pool.k(0)[1:4] = 5.0
    assert not pool.peers_bytes.any()
    pool.to_peers([1, 2])
    assert torch.equal(pool.block_bytes_view(1), pool.bytes[1])
    assert torch.equal(pool.block_bytes_view(2), pool.bytes[2])
    assert not pool.block_bytes_view(3).any()
    assert pool.address(2) == pool.block_bytes_view(2).data_ptr() != pool.bytes[2].data_ptr()
    assert pool.address(0) % 4096 == 0


def test_a_mirrored_pool_computes_with_what_was_read_and_taken_over() -> None:
    pool = _mirrored()
    for block in (0, 3, 4):
        pool.block_bytes_view(block).view(torch.float32).fill_(float(block + 1))
    assert not pool.bytes.any()
    pool.from_peers([4, 3])
    assert (pool.v(1)[3] == 4.0).all()
    assert (pool.k(0)[4] == 5.0).all()
    assert not pool.k(0)[0].any()


def test_a_block_is_copied_as_it_was_sealed_whatever_is_queued_on_the_device() -> None:
    pool = _mirrored()
    pool.k(0)[1] = 5.0
    pool.to_peers([1])
    pool.k(0)[1] = 7.0  # of whoever has the block next
    pool.copy(1, 4)
    assert (pool.k(0)[4] == 5.0).all()
    assert torch.equal(pool.block_bytes_view(4), pool.bytes[4])


def test_without_a_mirror_there_is_one_memory() -> None:
    pool = KvPool(KvLayout(4, "float32", (LayerShape(1, 2, 2),)), 2)
    assert pool.peers_bytes.data_ptr() == pool.bytes.data_ptr()
    pool.k(0)[1] = 3.0
    pool.to_peers([1])
    pool.from_peers([1])
    assert (pool.block_bytes_view(1).view(torch.float32)[:8] == 3.0).all()


def test_spare_blocks_lie_behind_those_of_peers() -> None:
    pool = KvPool(KvLayout(4, "float32", (LayerShape(1, 2, 2),)), 2, spare=1)
    pool.k(0)[2] = 7.0
    pool.v(0)[2] = 7.0
    assert pool.num_blocks == 2
    assert pool.nbytes == 2 * pool.layout.block_bytes
    assert not pool.peers_bytes.any()


@pytest.mark.parametrize(
    ("blocks", "wanted"),
    [([], []), ([3], [(3, 4)]), ([3, 4, 5, 9, 10, 1], [(3, 6), (9, 11), (1, 2)])],
)
def test_neighbours_are_one_copy(blocks: list[int], wanted: list[tuple[int, int]]) -> None:
    assert runs(blocks) == wanted
