"""What the stages hand to each other, named once so that both sides agree.

The owner announces with these contracts and the reader expects with the same
functions; whatever differs is found field by field (`Contract.check`).
"""

from __future__ import annotations

from math import prod
from typing import Final

from epd.kv.layout import KvLayout
from epd.models.spec import ModelSpec
from epd.transfer.contract import ITEM_BYTES, Contract

EMBEDDING_LAYOUT: Final = "embedding-planes/1"
"""[planes, rows, hidden], C order; plane 0 is the embedding, then deepstack levels."""


def embedding_contract(spec: ModelSpec, rows: int, nonce: int) -> Contract:
    """One span: all planes of one image."""
    return Contract(
        fingerprint=spec.fingerprint,
        dtype=spec.dtype,
        layout=EMBEDDING_LAYOUT,
        shape=(spec.planes, rows, spec.hidden),
        nonce=nonce,
    )


def embedding_bytes(spec: ModelSpec, rows: int) -> int:
    """Bytes of one image's embedding, in the encoder's arena and where it lands."""
    return prod((spec.planes, rows, spec.hidden)) * ITEM_BYTES[spec.dtype]


def kv_contract(spec: ModelSpec, layout: KvLayout, nonce: int) -> Contract:
    """One span: one block of all layers."""
    return Contract(
        fingerprint=spec.fingerprint,
        dtype=layout.dtype,
        layout=layout.name,
        shape=layout.block_shape,
        nonce=nonce,
    )
