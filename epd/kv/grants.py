"""What prefill has announced to a decode of its own process. Pure: block numbers only.

A handle comes over the wire, and says addresses; inside the process it only names a
grant, which ends with prefill's lease. A grant's blocks are held by prefill as long as
it is there, so that decode can become one more holder.
"""

from __future__ import annotations

from collections.abc import Sequence


class Grants:
    """By the nonce of a request's attempt: its announced blocks, in token order.

    `owner` is whoever announces them. Nonces are drawn at random; one that comes twice is
    its first owner's, and the second gets no grant.
    """

    def __init__(self) -> None:
        self._granted: dict[int, tuple[object, list[int]]] = {}

    def __len__(self) -> int:
        return len(self._granted)

    def extend(self, nonce: int, owner: object, blocks: Sequence[int]) -> None:
        """The next blocks were announced."""
        first, known = self._granted.setdefault(nonce, (owner, []))
        if first is owner:
            known += blocks

    def find(self, nonce: int, first: int, blocks: Sequence[int]) -> bool:
        """Whether exactly these were granted, from block `first` on, and still are."""
        _, known = self._granted.get(nonce, (None, []))
        return known[first : first + len(blocks)] == list(blocks)

    def end(self, nonce: int, owner: object) -> None:
        """The lease is over. Nothing happens the second time."""
        if self._granted.get(nonce, (None, []))[0] is owner:
            del self._granted[nonce]
