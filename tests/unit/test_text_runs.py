"""Runs of rows: what stands around them is the same however long they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from epd.models.processor import Processor
from epd.text.runs import RowRuns
from epd.text.words import TextTokenizer
from tests.tiny import FAMILIES

TEXTS = ("{}", "what is {}?", "a{} b", " {} \n\n{}{}\n\u6f22{}", "{}.{}")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_made_long_again_is_as_if_tokenised(
    tiny_checkpoint: Callable[[str], Path], family: str
) -> None:
    made = Processor.load(tiny_checkpoint(family))
    words = TextTokenizer(made.tokenizer)
    runs = RowRuns(words, made.tokenizer, made.image_token_id)
    row = made.tokenizer.convert_ids_to_tokens(made.image_token_id)
    for text in TEXTS:
        whole = text
        for rows in (7, 1, 30, 2)[: text.count("{}")]:
            whole = whole.replace("{}", row * rows, 1)
        short, counts = runs.shortened(whole)
        assert short.count(row) == len(counts) < whole.count(row)
        assert sum(counts) == whole.count(row)
        ids = words.ids([(short, False)], True, None, "")
        assert runs.lengthened(ids, counts) == words.ids([(whole, False)], True, None, "")


class Counting:
    """A tokenizer to which it matters how often a row stands there: two are one token."""

    def __init__(self) -> None:
        self.backend_tokenizer = Tokenizer.from_str(_COUNTING)
        self.split_special_tokens = False

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return "<r>"


_COUNTING = """{
 "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
 "pre_tokenizer": null, "post_processor": null, "decoder": null,
 "added_tokens": [
  {"id": 1, "content": "<r>", "single_word": false, "lstrip": false, "rstrip": false,
   "normalized": false, "special": true},
  {"id": 2, "content": "<r><r>", "single_word": false, "lstrip": false, "rstrip": false,
   "normalized": false, "special": true}],
 "model": {"type": "WordLevel", "vocab": {"a": 0, "<r>": 1, "<r><r>": 2}, "unk_token": "a"}
}"""


def test_a_tokenizer_that_counts_gets_the_whole_text() -> None:
    tokenizer: Any = Counting()
    runs = RowRuns(TextTokenizer(tokenizer), tokenizer, 1)
    assert runs.shortened("a<r><r><r>b") == ("a<r><r><r>b", (1, 1, 1))


def test_another_number_of_rows_is_told() -> None:
    tokenizer: Any = Counting()
    runs = RowRuns(TextTokenizer(tokenizer), tokenizer, 1)
    assert runs.lengthened([0, 1, 0, 1], [2, 3]) == [0, 1, 1, 0, 1, 1, 1]
    assert runs.lengthened([0, 1], [2, 3]) is None
    assert runs.lengthened([0, 1, 1], [2]) is None
