"""Constrained decoding: which tokens keep the output inside a grammar (llguidance).

A `Grammar` travels with the job; each stage compiles it anew and replays the output so
far, so nothing of its state is ever handed over. The mask is a function of grammar and
output ids alone: the same in prefill (first token), in decode, and after a failover.

    Grammars.compile ──> Matcher ── allowed() ──> sampler ── advance(id) ──> Matcher ...
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from epd.errors import EpdError, ErrorKind, invalid, shortened, too_many
from epd.jobs import Grammar, GrammarKind

MAX_GRAMMAR_BYTES: Final = 256 << 10
"""No grammar that a peer sends is longer; `limits.max_grammar_bytes` is the clients' limit."""
_MAX_COMPILED: Final = 200_000
_LEXER_FUEL: Final = 200_000
_ROW_ITEMS: Final = 50_000
"""Work of one mask; a grammar that needs more fails, the same in every process. The
costliest mask that was found under these takes 15 ms (docs/api.md)."""
_WAITING: Final = 64
"""Grammars that wait for the compiling thread."""
_MOST_SHOWN: Final = 200
"""Characters of a regular expression that a refusal shows."""
_PLACE: Final = re.compile(r"\Aat \d+\(\d+\): ")
_EXCERPT: Final = re.compile(r"\n *\d+ \| .*\Z", re.DOTALL)
_JSON_FORMAT: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""One way to space JSON (that of Python's json), so that no model can fill its output
with white space."""


class Matcher:
    """Where one output is in its grammar. Used by one thread at a time."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def copy(self) -> Matcher:
        """Another that stands at the same place."""
        return Matcher(self._matcher.deep_copy(), self._vocab_size)

    @property
    def complete(self) -> bool:
        """Nothing can follow: the output ends here. A grammar that failed is not complete:
        `allowed` says what is wrong with it."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def allowed(self, suppressed: Iterable[int] = ()) -> NDArray[np.bool_]:
        """[vocabulary] True where a token may come next.

        `suppressed` ones (that end the output) may not, unless there are no others: a
        grammar that is complete can't be made longer.

        Raises:
            EpdError: the grammar grew beyond its limits.
        """
        self._check()
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        mask = np.unpackbits(packed, bitorder="little")[: self._vocab_size].astype(np.bool_)
        others = mask.copy()
        others[[token for token in suppressed if token < len(mask)]] = False
        return others if others.any() else mask

    def _check(self) -> None:
        if self._matcher.is_error():
            # The library's own text goes on with dumps of its state.
            reason = str(self._matcher.get_error()).strip().splitlines()[0]
            reason = reason.partition("<state>")[0].strip()[:200]
            raise invalid(f"grammar: can't be followed: {reason}", "grammar")

    def advance(self, token_id: int) -> None:
        """The token is output now. What is outside the grammar (a stop id of the client)
        ends it."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)


class Grammars:
    """Compiles for one checkpoint, in a thread of its own: the event loop and the engine
    thread go on meanwhile. The tokenizer is read when the first grammar comes."""

    def __init__(self, checkpoint: str, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._path = Path(checkpoint) / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._tokenizer: LLTokenizer | None = None
        self._loading = threading.Lock()
        self._waiting = 0
        self._thread: ThreadPoolExecutor | None = None

    async def compile(self, grammar: Grammar | None, output_ids: Sequence[int]) -> Matcher | None:
        """A matcher that stands after `output_ids`; None where nothing is constrained.

        Raises:
            EpdError: INVALID_REQUEST, what is wrong with the grammar; OVERLOADED.
        """
        if grammar is None:
            return None
        if self._waiting >= _WAITING:
            reason = f"{self._waiting} grammars wait to be compiled, the most that may"
            raise EpdError(ErrorKind.OVERLOADED, reason, retry_after_s=1.0)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "grammar")
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self.build, grammar, output_ids)
        finally:
            self._waiting -= 1

    def build(self, grammar: Grammar, output_ids: Sequence[int]) -> Matcher:
        """`compile`, in this thread."""
        tokenizer = self._load()
        limits = LLParserLimits(
            max_grammar_size=_MAX_COMPILED, step_lexer_fuel=_LEXER_FUEL, step_max_items=_ROW_ITEMS
        )
        made = LLMatcher(tokenizer, _source(grammar), log_level=0, limits=limits)
        if made.is_error():
            raise invalid(f"grammar: {_why(grammar, made.get_error())}", "grammar")
        matcher = Matcher(made, self._vocab_size)
        for token in output_ids:
            matcher.advance(token)
        return matcher

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _load(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                try:
                    self._tokenizer = LLTokenizer(
                        str(self._path), n_vocab=self._vocab_size, eos_token=self._eos_ids
                    )
                except ValueError as error:
                    reason = f"grammars need the checkpoint's tokenizer.json: {error}"
                    raise invalid(reason, "grammar") from error
            return self._tokenizer


def _why(grammar: Grammar, said: str) -> str:
    """The library's reason, without where that is in the source that we made of what the
    client wrote; of a regular expression with the client's own text."""
    reason = _PLACE.sub("", _EXCERPT.sub("", said)).strip()
    if grammar.kind is not GrammarKind.REGEX:
        return reason
    _, parsed, why = reason.partition("\nerror: ")
    if not parsed:
        why = reason.partition('" (in regex): ')[2] or reason
    why = why.partition(" in regex /")[0]
    return f"{shortened(grammar.text, _MOST_SHOWN)!r}: {why}"


def _source(grammar: Grammar) -> str:
    if len(grammar.text) > MAX_GRAMMAR_BYTES:
        raise too_many("grammar", len(grammar.text), MAX_GRAMMAR_BYTES, "characters")
    try:
        if grammar.kind is GrammarKind.JSON_SCHEMA:
            options: Any = _JSON_FORMAT
            return LLMatcher.grammar_from_json_schema(grammar.text, defaults=options)
        if grammar.kind is GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        return LLMatcher.grammar_from_lark(grammar.text)
    except ValueError as error:
        raise invalid(f"grammar: {error}", "grammar") from error
