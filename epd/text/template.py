"""A checkpoint's chat template: what it takes, and conversations in its form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from epd.errors import EpdError, invalid
from epd.text.marks import ControlTokens, Marks
from epd.text.messages import ChatMessage, ImagePart, TextPart, Tool

_PROBE = "zq7probe"


class ChatTemplate:
    """Renders with users' control tokens marked. `hf` is transformers' processor.

    Raises:
        EpdError: the checkpoint has no chat template, or one that shows no text.
    """

    def __init__(self, hf: Any, image_token: str) -> None:
        self._hf = hf
        self._image_token = image_token
        self.source = _template_source(hf)
        self.controls = ControlTokens(hf.tokenizer, self.source, image_token)
        self._listed = self._takes_lists()
        self._takes_tools = self._shows_tools()

    def render(self, messages: Sequence[ChatMessage], marks: Marks, tools: Sequence[Tool]) -> str:
        """The conversation as one text, ready for the model's answer.

        Raises:
            EpdError: the template refuses it.
        """
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

    def _templated(self, message: ChatMessage, marks: Marks) -> dict[str, Any]:
        shown: dict[str, Any] = {"role": message.role, "content": self._content(message, marks)}
        if message.name:
            shown["name"] = self.controls.mark(message.name, marks)
        return shown | self._calls(message, marks)

    def _content(self, message: ChatMessage, marks: Marks) -> str | list[dict[str, str]]:
        mark = self.controls.mark
        if not self._listed:
            return "".join(
                self._image_token if isinstance(part, ImagePart) else mark(part.text, marks)
                for part in message.parts
            )
        content = [
            {"type": "image"}
            if isinstance(part, ImagePart)
            else {"type": "text", "text": mark(part.text, marks)}
            for part in message.parts
        ]
        # Templates look at content[0]: an empty turn is an empty text.
        return content or [{"type": "text", "text": ""}]

    def _calls(self, message: ChatMessage, marks: Marks) -> dict[str, Any]:
        if not message.calls:
            return {}
        calls = [
            {
                "type": "function",
                "function": {
                    "name": self.controls.mark(call.name, marks),
                    "arguments": self.controls.mark_json(json.loads(call.arguments), marks),
                },
            }
            for call in message.calls
        ]
        return {"tool_calls": calls}

    def _shown(self, tool: Tool, marks: Marks) -> dict[str, Any]:
        function = {
            "name": tool.name,
            "description": self.controls.mark(tool.description, marks),
            "parameters": self.controls.mark_json(json.loads(tool.parameters), marks),
        }
        return {"type": "function", "function": function}

    def check_tools(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> None:
        """Raises EpdError: a conversation with tools, which this template doesn't show."""
        if self._takes_tools:
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
        if "<tool_call>" not in self.source:
            return False
        user = ChatMessage("user", (TextPart("a"),))
        marks = Marks.unused_in([self.source], "model.path")
        try:
            return _PROBE in self.render([user], marks, [Tool(_PROBE, "", "{}")])
        except EpdError:
            return False

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


def _template_source(hf: Any) -> str:
    template = hf.chat_template or hf.tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not isinstance(template, str):
        raise invalid("the checkpoint has no chat template", "model.path")
    return template
