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

from jinja2 import TemplateError

from epd.errors import EpdError, invalid
from epd.text.messages import ChatMessage, ImagePart, ImageSize, TextPart, Tool
from epd.text.words import TextTokenizer, check_could_fit

if TYPE_CHECKING:
    from epd.models.processor import Processor

_PROBE = "zq7probe"


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
    def load(cls, path: str) -> PromptBuilder:
        """Read a checkpoint's processor (imports torch and transformers)."""
        from epd.models.processor import Processor

        return cls.of(Processor.load(path))

    @classmethod
    def of(cls, processor: Processor) -> PromptBuilder:
        """Share a processor that is loaded already."""
        return cls(processor.hf, processor.image_token, processor.image_token_id, processor.plan)

    def __init__(self, hf: Any, image_token: str, image_token_id: int, plan: Plan) -> None:
        self._hf = hf
        self._tokenizer = hf.tokenizer
        self._image_token = image_token
        self._image_token_id = image_token_id
        self._plan = plan
        self._template = _template_source(hf)
        controls = _control_tokens(self._tokenizer, self._template, image_token)
        self._controls = re.compile("|".join(map(re.escape, controls)))
        self._placeholder = re.compile(re.escape(image_token))
        self._words = TextTokenizer(self._tokenizer)
        self._listed = self._takes_lists()
        self.takes_tools = self._shows_tools()
        self._longest_token = max(map(len, self._tokenizer.get_vocab()), default=1)

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
        self._check_tools(messages, tools)
        texts = [
            *_texts(messages),
            *(text for t in tools for text in (t.description, t.parameters)),
        ]
        if max_tokens is not None:
            check_could_fit(texts, max_tokens, self._longest_token, "messages")
        marks = _Marks.unused_in([*texts, self._template])
        rendered = self._render(messages, marks, tools)
        if self._count_placeholders(rendered, marks) != len(sizes):
            raise self._left_out(messages, marks, tools)
        plans = [self._planned(size, len(sizes)) for size in sizes]
        shown = [plan.replacement for plan in plans]
        ids = self._tokenise(rendered, marks, shown, max_tokens, "messages")
        rows = sum(plan.rows for plan in plans)
        if ids.count(self._image_token_id) != rows:
            raise invalid("the text can't be told from image placeholders", "messages")
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
        marks = _Marks.unused_in([text])
        ids = self._tokenise(self._mark(text, marks), marks, [], max_tokens, "prompt")
        return PromptPlan(tuple(ids), ())

    def _planned(self, size: ImageSize, images: int) -> PlannedItem:
        try:
            return self._plan(size.width, size.height, images)
        except EpdError as error:
            error.param = error.param or size.param or None
            raise

    # --- rendering -----------------------------------------------------------------

    def _render(self, messages: Sequence[ChatMessage], marks: _Marks, tools: Sequence[Tool]) -> str:
        conversation = [self._templated(message, marks) for message in messages]
        shown = {"tools": [self._shown(tool, marks) for tool in tools]} if tools else {}
        try:
            text: str = self._hf.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=True, **shown
            )
        except (TemplateError, TypeError, KeyError) as error:
            reason = f"the chat template refuses this conversation: {error}"
            raise invalid(reason, "messages") from error
        return text

    def _templated(self, message: ChatMessage, marks: _Marks) -> dict[str, Any]:
        if not self._listed:
            joined = "".join(
                self._image_token if isinstance(part, ImagePart) else self._mark(part.text, marks)
                for part in message.parts
            )
            return {"role": message.role, "content": joined, **self._calls(message, marks)}
        content = [
            {"type": "image"}
            if isinstance(part, ImagePart)
            else {"type": "text", "text": self._mark(part.text, marks)}
            for part in message.parts
        ]
        # Templates look at content[0]: an empty turn is an empty text.
        content = content or [{"type": "text", "text": ""}]
        return {"role": message.role, "content": content, **self._calls(message, marks)}

    def _calls(self, message: ChatMessage, marks: _Marks) -> dict[str, Any]:
        if not message.calls:
            return {}
        calls = [
            {
                "type": "function",
                "function": {
                    "name": self._mark(call.name, marks),
                    "arguments": self._mark_json(json.loads(call.arguments), marks),
                },
            }
            for call in message.calls
        ]
        return {"tool_calls": calls}

    def _shown(self, tool: Tool, marks: _Marks) -> dict[str, Any]:
        function = {
            "name": tool.name,
            "description": self._mark(tool.description, marks),
            "parameters": self._mark_json(json.loads(tool.parameters), marks),
        }
        return {"type": "function", "function": function}

    def _mark_json(self, value: Any, marks: _Marks) -> Any:
        if isinstance(value, str):
            return self._mark(value, marks)
        if isinstance(value, list):
            return [self._mark_json(item, marks) for item in value]
        if isinstance(value, dict):
            return {self._mark(k, marks): self._mark_json(v, marks) for k, v in value.items()}
        return value

    # --- tools -----------------------------------------------------------------------

    def _check_tools(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> None:
        if self.takes_tools:
            return
        reason = "this model's chat template takes no tools"
        if tools:
            raise invalid(reason, "tools")
        for i, message in enumerate(messages):
            if message.calls:
                raise invalid(reason, f"messages[{i}].tool_calls")
            if message.role == "tool":
                raise invalid(reason, f"messages[{i}].role")

    def _shows_tools(self) -> bool:
        """Whether the template shows tools and wants calls in the form that we parse."""
        if "<tool_call>" not in self._template:
            return False
        user = ChatMessage("user", (TextPart("a"),))
        marks = _Marks.unused_in([self._template])
        try:
            return _PROBE in self._render([user], marks, [Tool(_PROBE, "", "{}")])
        except EpdError:
            return False

    def _mark(self, text: str, marks: _Marks) -> str:
        normalizer = self._tokenizer.backend_tokenizer.normalizer
        if normalizer is not None and not text.isascii():
            # What only normalisation turns into a control token is marked as well.
            normal = normalizer.normalize_str(text)
            if len(self._controls.findall(normal)) > len(self._controls.findall(text)):
                text = normal
        return self._controls.sub(lambda found: marks.wrap(found[0]), text)

    def _takes_lists(self) -> bool:
        """Whether the template reads lists of parts (else it wants one string)."""
        for content in ([{"type": "text", "text": _PROBE}], _PROBE):
            try:
                text = self._hf.apply_chat_template(
                    [{"role": "user", "content": content}],
                    tokenize=False,
                    add_generation_prompt=True,
                )
            except (TemplateError, TypeError, KeyError):
                continue
            if text.count(_PROBE) == 1 and "'type'" not in text:
                return isinstance(content, list)
        raise invalid("the checkpoint's chat template doesn't show a user's text", "model.path")

    # --- images ----------------------------------------------------------------------

    def _count_placeholders(self, rendered: str, marks: _Marks) -> int:
        pieces = marks.split(rendered)
        return sum(len(self._placeholder.findall(text)) for text, plain in pieces if not plain)

    def _left_out(
        self, messages: Sequence[ChatMessage], marks: _Marks, tools: Sequence[Tool]
    ) -> EpdError:
        """Name the first image that the template doesn't show where it stands."""
        whole = self._count_placeholders(self._render(messages, marks, tools), marks)
        for i, message in enumerate(messages):
            for j, part in enumerate(message.parts):
                if not isinstance(part, ImagePart):
                    continue
                fewer = replace(message, parts=(*message.parts[:j], *message.parts[j + 1 :]))
                without = self._render([*messages[:i], fewer, *messages[i + 1 :]], marks, tools)
                if self._count_placeholders(without, marks) != whole - 1:
                    reason = f"this model takes no image in a {message.role} message"
                    return invalid(reason, f"messages[{i}].content[{j}]")
        return invalid("the chat template doesn't show every image once", "messages")

    # --- tokens ----------------------------------------------------------------------

    def _tokenise(
        self,
        rendered: str,
        marks: _Marks,
        replacements: Sequence[str],
        max_tokens: int | None,
        param: str,
    ) -> list[int]:
        left = iter(replacements)
        pieces = [
            (text if plain else self._placeholder.sub(lambda _: next(left), text), plain)
            for text, plain in marks.split(rendered)
        ]
        bos = self._tokenizer.bos_token
        # As in transformers: a template that writes the first token itself gets no other.
        add_special = not (bos and rendered.startswith(bos))
        return self._words.ids(pieces, add_special, max_tokens, param)


def _texts(messages: Sequence[ChatMessage]) -> Iterable[str]:
    """Everything that users wrote."""
    for message in messages:
        for part in message.parts:
            if isinstance(part, TextPart):
                yield part.text
        for call in message.calls:
            yield call.name
            # As it is in the JSON and as the template will see it.
            yield call.arguments
            yield json.dumps(json.loads(call.arguments), ensure_ascii=False)


def _template_source(hf: Any) -> str:
    template = hf.chat_template or hf.tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not isinstance(template, str):
        raise invalid("the checkpoint has no chat template", "model.path")
    return template


def _control_tokens(tokenizer: Any, template: str, image_token: str) -> list[str]:
    """Special tokens, and added tokens that the template itself writes; longest first."""
    found = {
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if token.special or (token.content in template and not token.content.isspace())
    }
    return sorted(found | {image_token}, key=lambda token: (-len(token), token))


@dataclass(frozen=True, slots=True)
class _Marks:
    """Two characters that occur nowhere in a request's text; they fence users' tokens."""

    start: str
    end: str

    @classmethod
    def unused_in(cls, texts: Iterable[str]) -> _Marks:
        used = set().union(*texts)
        free = (chr(point) for point in range(0xF0000, 0xFFFFE) if chr(point) not in used)
        return cls(next(free), next(free))

    def wrap(self, text: str) -> str:
        return f"{self.start}{text}{self.end}"

    def split(self, rendered: str) -> list[tuple[str, bool]]:
        """Pieces of text; True for what stood between marks.

        A template's own string functions may part a pair of marks: a lone mark
        disappears, but what stood beside it can't join into a token.
        """
        pattern = f"{self.start}([^{self.start}{self.end}]*){self.end}|[{self.start}{self.end}]"
        parts = re.split(pattern, rendered)
        pieces = [(text, at % 2 == 1) for at, text in enumerate(parts) if text]
        return pieces or [("", False)]
