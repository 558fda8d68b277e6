"""Checksums see every byte, in place, whatever the view."""

from __future__ import annotations

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from epd.errors import EpdError, ErrorKind
from epd.transfer.checksum import checksum, checksum_at, verify_at


@given(st.binary(min_size=1, max_size=300), st.data())
def test_every_single_byte_counts(content: bytes, data: st.DataObject) -> None:
    tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    before = checksum(tensor)
    assert before == checksum(content) == xxhash.xxh3_64_intdigest(content)
    place = data.draw(st.integers(0, len(content) - 1))
    tensor[place] ^= data.draw(st.integers(1, 255))
    assert checksum(tensor) != before


def test_views_of_the_same_bytes_agree() -> None:
    block = torch.randn(4, 8, dtype=torch.float32)
    as_bytes = block.view(torch.uint8)
    assert checksum(block) == checksum(as_bytes) == checksum(block.view(torch.bfloat16))
    assert checksum(block[1]) == checksum_at(block.data_ptr() + 32, 32)
    assert checksum(block[1]) != checksum(block[2])


def test_a_strided_view_is_refused() -> None:
    with pytest.raises(AssertionError, match="contiguous"):
        checksum(torch.zeros(4, 4)[:, 1])


def test_no_bytes_have_a_sum_too() -> None:
    assert checksum(torch.zeros(0)) == checksum(b"") == checksum_at(0, 0)


def test_verify_names_what_arrived_wrong() -> None:
    tensor = torch.arange(64, dtype=torch.uint8)
    expected = checksum(tensor)
    verify_at(tensor.data_ptr(), 64, expected, "block 3")
    tensor[63] += 1
    with pytest.raises(EpdError, match=f"block 3: 64 bytes .* announced {expected:016x}") as bad:
        verify_at(tensor.data_ptr(), 64, expected, "block 3")
    assert bad.value.kind is ErrorKind.CHECKSUM_MISMATCH
