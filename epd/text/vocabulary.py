"""The bytes that a single token stands for (logprobs report them)."""

from __future__ import annotations

import re
from functools import lru_cache

from tokenizers import Tokenizer

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@lru_cache(maxsize=1)
def _byte_level_alphabet() -> dict[str, int]:
    """Inverse of GPT-2's table of printable stand-ins for all 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}


class Vocabulary:
    """Bytes of tokens, for the decoders that tokenizer.json files name."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = str(tokenizer.decoder)
        self._byte_level = "ByteLevel" in decoder
        self._metaspace = "Metaspace" in decoder or "▁" in decoder
        added = tokenizer.get_added_tokens_decoder()
        self._skipped = {index for index, token in added.items() if token.special}
        self._added = set(added)
        self._raw: dict[int, bytes | None] = {}
        """Of ids that were asked for; None: skipped. At most one entry an id."""

    def is_skipped(self, token_id: int) -> bool:
        """Whether the token has no text: a special token, or no token at all."""
        return self._known(token_id) is None

    def raw(self, token_id: int) -> bytes:
        """Bytes of the token's text; maybe a part of a character. b"" if skipped."""
        return self._known(token_id) or b""

    def _known(self, token_id: int) -> bytes | None:
        try:
            return self._raw[token_id]
        except KeyError:
            nothing = token_id in self._skipped or self._tokenizer.id_to_token(token_id) is None
            found = self._raw[token_id] = None if nothing else self.name(token_id)
            return found

    def name(self, token_id: int) -> bytes:
        """Like `raw`, but a special token is its own written form."""
        text: str | None = self._tokenizer.id_to_token(token_id)
        if text is None:
            return b""
        if token_id in self._added:
            return text.encode()
        if fallback := _BYTE_FALLBACK.fullmatch(text):
            return bytes([int(fallback[1], 16)])
        if self._byte_level:
            table = _byte_level_alphabet()
            if all(char in table for char in text):
                return bytes(table[char] for char in text)
        return (text.replace("▁", " ") if self._metaspace else text).encode()
