"""Messages to prompt ids: the checkpoint's own chat template, users' text as text.

    messages ──> mark what users typed that looks like a control token
             ──> chat template (unmarked placeholders are the template's own)
             ──> each placeholder becomes its image's run
             ──> tokenise: marked pieces as plain text, the rest as usual

For ordinary text this gives exactly the ids of transformers'
``processor.apply_chat_template(..., tokenize=True)``. Text is left in place for
the template (templates trim and inspect it), so no sentinel stands in its stead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from epd.errors import EpdError, invalid
from epd.text.marks import Marks
from epd.text.messages import ChatMessage, ImagePart, ImageSize, TextPart, Tool
from epd.text.runs import RowRuns
from epd.text.template import ChatTemplate
from epd.text.words import TextTokenizer, check_could_fit

if TYPE_CHECKING:
    from epd.models.processor import Processor


class PlannedItem(Protocol):
    """What the prompt needs to know of an image (`epd.models.processor.ItemPlan`)."""

    @property
    def rows(self) -> int: ...
    @property
    def grid(self) -> tuple[int, ...]: ...
    @property
    def replacement(self) -> str: ...


Plan = Callable[[int, int, int], PlannedItem]
"""(width, height, images in the request) -> plan of one image."""


@dataclass(frozen=True, slots=True)
class ItemRows:
    """Rows and patch grid of one image of the prompt."""

    rows: int
    grid: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """A prompt with all placeholders expanded; `items` in the order of the images."""

    token_ids: tuple[int, ...]
    items: tuple[ItemRows, ...]

    @property
    def image_tokens(self) -> int:
        return sum(item.rows for item in self.items)


class PromptBuilder:
    """Builds prompts for one checkpoint. Not thread-safe where the processor isn't.

    `hf` is transformers' processor, `plan` counts the rows of a picture.

    Raises:
        EpdError: the checkpoint has no chat template, or one that shows no text.
    """

    @classmethod
    def of(cls, processor: Processor) -> PromptBuilder:
        return cls(processor.hf, processor.image_token, processor.image_token_id, processor.plan)

    def __init__(self, hf: Any, image_token: str, image_token_id: int, plan: Plan) -> None:
        self._tokenizer = hf.tokenizer
        self._bos: str | None = hf.tokenizer.bos_token
        self._plan = plan
        self._template = ChatTemplate(hf, image_token)
        self._placeholder = re.compile(re.escape(image_token))
        self._words = TextTokenizer(self._tokenizer)
        self._longest_token = max(map(len, self._tokenizer.get_vocab()), default=1)
        self._runs = RowRuns(self._words, self._tokenizer, image_token_id)

    def build(
        self,
        messages: Sequence[ChatMessage],
        sizes: Sequence[ImageSize],
        max_tokens: int | None = None,
        tools: Sequence[Tool] = (),
    ) -> PromptPlan:
        """Ids and rows of a prompt. `max_tokens` lets hopeless lengths fail early.

        Raises:
            EpdError: the template refuses the conversation or leaves an image out
                (named), or the text can't fit `max_tokens`.
        """
        self._template.check_tools(messages, tools)
        texts = [
            *_texts(messages),
            *(text for t in tools for text in (t.description, t.parameters)),
        ]
        if max_tokens is not None:
            check_could_fit(texts, max_tokens, self._longest_token, "messages")
        names = [message.name for message in messages]
        marks = Marks.unused_in([*texts, *names, self._template.source], "messages")
        rendered = self._template.render(messages, marks, tools)
        pieces = marks.split(rendered)
        if self._count_placeholders(pieces) != len(sizes):
            raise self._left_out(messages, marks, tools)
        plans = [self._planned(size, len(sizes)) for size in sizes]
        ids = self._ids(pieces, self._adds_special(rendered), plans, max_tokens)
        if not ids:
            raise invalid("the prompt is empty", "messages")
        return PromptPlan(tuple(ids), tuple(ItemRows(p.rows, tuple(p.grid)) for p in plans))

    def encode(self, text: str, max_tokens: int | None = None) -> PromptPlan:
        """Ids of a text as it is, with what the tokenizer itself puts around a text. What
        looks like a control token in it is text.

        Raises:
            EpdError: it can't fit `max_tokens`.
        """
        if max_tokens is not None:
            check_could_fit([text], max_tokens, self._longest_token, "prompt")
        marks = Marks.unused_in([text], "prompt")
        marked = self._template.controls.mark(text, marks)
        special = self._adds_special(marked)
        ids = self._tokenise(marks.split(marked), special, [], max_tokens, "prompt")
        return PromptPlan(tuple(ids), ())

    def _planned(self, size: ImageSize, images: int) -> PlannedItem:
        try:
            return self._plan(size.width, size.height, images)
        except EpdError as error:
            error.param = error.param or size.param or None
            raise

    # --- images ----------------------------------------------------------------------

    def _count_placeholders(self, pieces: Sequence[tuple[str, bool]]) -> int:
        return sum(len(self._placeholder.findall(text)) for text, plain in pieces if not plain)

    def _left_out(
        self, messages: Sequence[ChatMessage], marks: Marks, tools: Sequence[Tool]
    ) -> EpdError:
        """Name the first image that the template doesn't show where it stands."""

        def shown(conversation: Sequence[ChatMessage]) -> int:
            rendered = self._template.render(conversation, marks, tools)
            return self._count_placeholders(marks.split(rendered))

        whole = shown(messages)
        for i, message in enumerate(messages):
            for j, part in enumerate(message.parts):
                if not isinstance(part, ImagePart):
                    continue
                fewer = replace(message, parts=(*message.parts[:j], *message.parts[j + 1 :]))
                others = [*messages[:i], fewer, *messages[i + 1 :]]
                if shown(others) != whole - 1:
                    reason = f"this model takes no image in a {message.role} message"
                    return invalid(reason, f"messages[{i}].content[{j}]")
        return invalid("the chat template doesn't show every image once", "messages")

    # --- tokens ----------------------------------------------------------------------

    def _ids(
        self,
        pieces: Sequence[tuple[str, bool]],
        add_special: bool,
        plans: Sequence[PlannedItem],
        max_tokens: int | None,
    ) -> list[int]:
        """Of a conversation, whose placeholders become the images' rows."""
        shown = [self._runs.shortened(plan.replacement) for plan in plans]
        short = self._tokenise(
            pieces, add_special, [text for text, _ in shown], max_tokens, "messages"
        )
        runs = [run for _, runs in shown for run in runs]
        ids = self._runs.lengthened(short, runs)
        if ids is None or sum(runs) != sum(plan.rows for plan in plans):
            raise invalid("the text can't be told from image placeholders", "messages")
        return ids

    def _tokenise(
        self,
        pieces: Sequence[tuple[str, bool]],
        add_special: bool,
        replacements: Sequence[str],
        max_tokens: int | None,
        param: str,
    ) -> list[int]:
        left = iter(replacements)
        expanded = [
            (text if plain else self._placeholder.sub(lambda _: next(left), text), plain)
            for text, plain in pieces
        ]
        return self._words.ids(expanded, add_special, max_tokens, param)

    def _adds_special(self, text: str) -> bool:
        """As in transformers: a template that writes the first token itself gets no other."""
        return not (self._bos and text.startswith(self._bos))


def _texts(messages: Sequence[ChatMessage]) -> Iterable[str]:
    """Everything that users wrote and templates show; few show names of speakers."""
    for message in messages:
        for part in message.parts:
            if isinstance(part, TextPart):
                yield part.text
        for call in message.calls:
            yield call.name
            # As it is in the JSON and as the template will see it.
            yield call.arguments
            yield json.dumps(json.loads(call.arguments), ensure_ascii=False)
