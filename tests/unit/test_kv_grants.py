"""Grants: decode of one process takes over just what prefill leases to its attempt."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from epd.kv.grants import Grants
from epd.kv.layout import KvLayout, LayerShape
from epd.kv.store import KvStore

STEPS = st.lists(
    st.tuples(st.sampled_from(["extend", "end"]), st.integers(0, 2), st.integers(0, 2)),
    max_size=30,
)


@given(STEPS)
def test_only_the_first_owner_of_a_nonce_grants_until_it_ends(
    steps: list[tuple[str, int, int]],
) -> None:
    grants, model, fresh = Grants(), dict[int, tuple[int, list[int]]](), 0
    owners = [object(), object(), object()]
    for verb, nonce, owner in steps:
        if verb == "extend":
            blocks = [fresh, fresh + 1]
            fresh += 2
            grants.extend(nonce, owners[owner], blocks)
            first, known = model.setdefault(nonce, (owner, []))
            if first == owner:
                known += blocks
        else:
            grants.end(nonce, owners[owner])
            if model.get(nonce, (None, []))[0] == owner:
                del model[nonce]
        assert len(grants) == len(model)
        for number in range(3):
            _, known = model.get(number, (None, []))
            for first in range(len(known)):
                assert grants.find(number, first, known[first:])
            assert not grants.find(number, 0, [*known, 999])
            assert not grants.find(number, 1, known[:1] or [999])


def store(**options: Any) -> KvStore:
    layout = KvLayout(4, "float32", (LayerShape(1, 2, 2),))
    return KvStore(layout, 8, "cpu", fingerprint="f", numerics_id="n", cached=True, **options)


def test_addresses_of_other_blocks_or_of_no_block_are_not_granted() -> None:
    kv, owner = store(), object()
    kv.grants.extend(5, owner, [3, 1])
    at = kv.pool.address
    assert kv.granted(5, 0, [at(3), at(1)]) == [3, 1]
    assert kv.granted(5, 1, [at(1)]) == [1]
    assert kv.granted(5, 0, [at(3), at(2)]) is None
    assert kv.granted(5, 0, [at(1)]) is None
    assert kv.granted(6, 0, [at(3)]) is None
    assert kv.granted(5, 0, [at(3) + 1]) is None
    assert kv.granted(5, 0, [at(7) + kv.layout.block_bytes]) is None
    assert kv.granted(5, 0, [at(0) - kv.layout.block_bytes]) is None
    kv.grants.end(5, owner)
    assert kv.granted(5, 0, [at(3), at(1)]) is None


def test_a_block_is_copied_whole() -> None:
    kv = store()
    kv.pool.block_bytes_view(2)[:] = 7
    kv.pool.copy(2, 5)
    assert (kv.pool.block_bytes_view(5) == 7).all()
    assert (kv.pool.block_bytes_view(4) == 0).all()
