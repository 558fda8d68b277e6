"""POST /v1/responses, stateless: one answer, nothing kept. What needs state is refused.

The body is translated to that of a chat and takes the same checks; names of fields in
errors are translated back.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from epd.config import LimitsConfig
from epd.errors import EpdError, too_many
from epd.jobs import FinishReason
from epd.text.vocabulary import Vocabulary
from gateway.answer import Answer, Part
from gateway.fields import Fields, as_json
from gateway.naming import Names
from gateway.schema import ChatCall, load_json, parse_chat

_NOT_SERVED: dict[str, Sequence[Any]] = {
    "store": (False,),
    "background": (False,),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    # Models here don't reason: there is nothing to be included.
    "include": ([], ["reasoning.encrypted_content"]),
    "reasoning": ({}, {"effort": "none"}),
    "truncation": ("disabled",),
    "max_tool_calls": (),
    "top_logprobs": (0,),
    "service_tier": ("auto", "default"),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "stream_options": ({}, {"include_obfuscation": False}),
    "context_management": ([],),
}
_SAME = (
    *("model", "stream", "user", "metadata", "safety_identifier", "prompt_cache_key"),
    "parallel_tool_calls",
    *("temperature", "top_p", "seed", "stop", "top_k", "min_p", "repetition_penalty"),
)
"""Fields that have the same name and meaning in a chat."""
_NAMES = (
    (r"max_(completion_)?tokens", "max_output_tokens"),
    (r"response_format(\.json_schema)?", "text.format"),
    (r"(tools\[\d+\]|tool_choice)\.function", r"\1"),
    (r"messages\[-1\].*", "instructions"),
    (r"(messages\[\d+\]\.content\[\d+\])\.image_url\.url", r"\1.image_url"),
    (r"(messages\[\d+\]\.content\[\d+\])\.image_url\.detail", r"\1.detail"),
    (r"(messages\[\d+\])\.(tool_calls\[0\]\.id|tool_call_id)", r"\1.call_id"),
    (r"(messages\[\d+\])\.tool_calls(\[0\])?(\.function)?", r"\1"),
)
"""What those of a chat are called here; the items of `input`: `_names`."""
_TOOL: dict[str, Any] = {"description": None, "parameters": None, "strict": False}
"""What a tool is where the client left it open."""
_MOST_METADATA = 64 << 10
"""As JSON; three events of a stream repeat it."""
_PARTS = {"input_text": "text", "output_text": "text", "text": "text"}


def parse_response(body: bytes, limits: LimitsConfig, vocab_size: int) -> ChatCall:
    """Check a JSON body.

    Raises:
        EpdError: INVALID_REQUEST naming the field as the client wrote it.
    """
    fields = Fields(load_json(body), "")
    chat: dict[str, Any] = {name: fields.take(name) for name in _SAME}
    chat["max_completion_tokens"] = fields.take("max_output_tokens")
    form = _format(fields)
    chat["response_format"] = _chat_format(form)
    tools, choice = fields.array("tools") or (), fields.take("tool_choice")
    if len(tools) > limits.max_tools:
        raise too_many("tools", len(tools), limits.max_tools, "tools")
    chat["tools"] = [_tool(tool) for tool in tools] or None
    chat["tool_choice"] = _tool_choice(choice)
    instructions, metadata = fields.string("instructions"), chat["metadata"]
    if not isinstance(metadata, Mapping | None):
        raise fields.wrong("metadata", "must be an object")
    if (size := len(as_json(metadata or {}, "metadata"))) > _MOST_METADATA:
        raise too_many("metadata", size, _MOST_METADATA, "bytes")
    first = [{"role": "system", "content": instructions}] if instructions else []
    said = fields.take("input")
    messages = _messages(fields, said, limits)
    chat["messages"] = [*first, *messages]
    fields.refuse(_NOT_SERVED)
    fields.done()
    names = _names(None if isinstance(said, str) else messages, len(first))
    with names.used():
        call = parse_chat(chat, limits, vocab_size)
    repeated = {
        "instructions": instructions,
        "metadata": metadata or {},
        "parallel_tool_calls": chat["parallel_tool_calls"] is not False,
        "text": {"format": form or {"type": "text"}},
        "tool_choice": choice or "auto",
        "tools": [_TOOL | {k: v for k, v in tool.items() if v is not None} for tool in tools],
    }
    for name, value in repeated.items():
        as_json([[[value]]], name)  # as deep as events have it
    return replace(call, repeated=repeated, names=names)


def _names(items: Sequence[Any] | None, before: int) -> Names:
    """The client's, where messages were made of these items, or of a text, behind `before`
    others."""
    if items is None:
        return Names((*_NAMES, (r"messages(\[\d+\].*)?", "input")), before)
    results = "|".join(str(at) for at, item in enumerate(items) if item["role"] == "tool")
    output = (rf"(messages\[(?:{results})\])\.content", r"\1.output")
    more = (output,) if results else ()
    return Names((*_NAMES, *more, (r"messages", "input")), before)


def _format(fields: Fields) -> Any:
    value = fields.take("text")
    if value is None:
        return None
    inner = Fields(value, "text")
    found = inner.take("format")
    inner.refuse({"verbosity": ("medium",)})
    inner.done()
    return found


def _chat_format(found: Any) -> Any:
    if isinstance(found, Mapping) and found.get("type") == "json_schema":
        schema = {key: item for key, item in found.items() if key != "type"}
        return {"type": "json_schema", "json_schema": schema}
    return found


def _tool(value: Any) -> Any:
    if not isinstance(value, Mapping) or value.get("type") != "function":
        return value
    function = {key: item for key, item in value.items() if key != "type"}
    return {"type": "function", "function": function}


def _tool_choice(value: Any) -> Any:
    return _tool(value) if isinstance(value, Mapping) else value


def _messages(fields: Fields, value: Any, limits: LimitsConfig) -> list[Any]:
    if value is None:
        raise fields.wrong("input", "is missing")
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise fields.wrong("input", "must be a text or an array of items")
    if len(value) > limits.max_messages:
        raise too_many("input", len(value), limits.max_messages, "items")
    contents = [item.get("content") for item in value if isinstance(item, Mapping)]
    parts = sum(len(content) for content in contents if isinstance(content, list))
    if parts > limits.max_parts:
        raise too_many("input", parts, limits.max_parts, "parts of all items")
    return [_item(item, f"input[{at}]") for at, item in enumerate(value)]


def _item(value: Any, path: str) -> dict[str, Any]:
    item = Fields(value, path)
    kind = item.string("type") or "message"
    for ignored in ("id", "status"):  # what an earlier answer said of itself
        item.string(ignored)
    if kind == "function_call":
        function = {"name": item.take("name"), "arguments": item.take("arguments")}
        call = {"id": item.take("call_id"), "type": "function", "function": function}
        message: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
    elif kind == "function_call_output":
        call_id, output = item.take("call_id"), _content(item.take("output"))
        message = {"role": "tool", "tool_call_id": call_id, "content": output}
    elif kind == "message":
        message = {"role": item.take("role"), "content": _content(item.take("content"))}
    else:
        raise item.wrong("type", f"{kind!r} is not supported")
    item.done()
    return message


def _content(value: Any) -> Any:
    return [_part(part) for part in value] if isinstance(value, list) else value


def _part(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    kind = value.get("type")
    if kind in _PARTS:
        dropped = ("annotations", "logprobs")  # of an earlier answer; they are no input
        return {k: v for k, v in value.items() if k not in dropped} | {"type": _PARTS[kind]}
    if kind == "input_image" and value.get("file_id") is None:
        named = ("type", "image_url", "file_id")
        more = {key: item for key, item in value.items() if key not in named}
        return {"type": "image_url", "image_url": {"url": value.get("image_url"), **more}}
    return value


class ResponseEncoder:
    """Encodes one answer in the form of /v1/responses."""

    def __init__(self, answer: Answer, model: str, vocabulary: Vocabulary) -> None:
        self._answer = answer
        self._model = model
        self._created = int(time.time())
        self._sequence = 0
        self._output: list[dict[str, Any]] = []
        """Items; the last one may be open."""
        self._open = False

    def first(self) -> bytes:
        created = self._event("response.created", response=self._response("in_progress"))
        return created + self._event("response.in_progress", response=self._response("in_progress"))

    def part(self, part: Part) -> bytes:
        chunks: list[bytes] = []
        if part.piece is not None and part.piece.text:
            chunks += self._text(part.piece.text)
        for call in part.calls:
            if call.id:
                chunks += [*self._close(), self._start_call(call.id, call.name)]
            chunks.append(self._arguments(call.arguments))
        if part.reason is not None:
            # Half a call must not look like one that is to be made.
            cut = part.reason is FinishReason.LENGTH
            chunks += self._close("incomplete" if cut else "completed")
        return b"".join(chunks)

    def last(self) -> bytes:
        status = self._status()
        return self._event(f"response.{status}", response=self._response(status))

    def whole(self, parts: Sequence[Part]) -> bytes:
        for part in parts:
            self.part(part)
        return orjson.dumps(self._response(self._status()))

    def error(self, error: EpdError) -> bytes:
        """The event that ends a stream with a fault."""
        response = self._response("failed")
        response["error"] = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response=response)

    @staticmethod
    def refused(error: EpdError) -> bytes:
        """The whole stream of a request that nothing came of."""
        body = {"code": str(error.kind), "message": error.message, "param": error.param}
        data = orjson.dumps({"type": "error", "sequence_number": 0, **body})
        return b"event: error\ndata: " + data + b"\n\n"

    # --- items -------------------------------------------------------------------------

    def _text(self, text: str) -> list[bytes]:
        chunks: list[bytes] = []
        if not self._open or self._output[-1]["type"] != "message":
            chunks = [*self._close(), *self._start_message()]
        self._output[-1]["content"][0]["text"] += text
        chunks.append(
            self._event("response.output_text.delta", **self._place(0), delta=text, logprobs=[])
        )
        return chunks

    def _start_message(self) -> list[bytes]:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item = {"type": "message", "id": f"msg_{secrets.token_hex(12)}", "role": "assistant"}
        added = self._add({**item, "status": "in_progress", "content": []})
        self._output[-1]["content"].append(part)
        return [added, self._event("response.content_part.added", **self._place(0), part=part)]

    def _start_call(self, identity: str, name: str) -> bytes:
        item = {"type": "function_call", "id": f"fc_{secrets.token_hex(12)}", "call_id": identity}
        return self._add({**item, "name": name, "arguments": "", "status": "in_progress"})

    def _arguments(self, text: str) -> bytes:
        self._output[-1]["arguments"] += text
        return self._event("response.function_call_arguments.delta", **self._place(), delta=text)

    def _add(self, item: dict[str, Any]) -> bytes:
        self._output.append(item)
        self._open = True
        at = len(self._output) - 1
        return self._event("response.output_item.added", output_index=at, item=item)

    def _close(self, status: str = "completed") -> list[bytes]:
        if not self._open:
            return []
        self._open = False
        item = self._output[-1]
        item["status"] = status
        if item["type"] == "message":
            part = item["content"][0]
            done = [
                self._event(
                    "response.output_text.done", **self._place(0), text=part["text"], logprobs=[]
                ),
                self._event("response.content_part.done", **self._place(0), part=part),
            ]
        else:
            kind, text = "response.function_call_arguments.done", item["arguments"]
            done = [self._event(kind, **self._place(), name=item["name"], arguments=text)]
        at = len(self._output) - 1
        return [*done, self._event("response.output_item.done", output_index=at, item=item)]

    def _place(self, content: int | None = None) -> dict[str, Any]:
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        return place if content is None else {**place, "content_index": content}

    # --- the response ------------------------------------------------------------------

    def _status(self) -> str:
        return "incomplete" if self._answer.reason is FinishReason.LENGTH else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        answer = self._answer
        asked = answer.call.generation
        usage = answer.usage
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": answer.request_id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": why,
            **answer.call.repeated,
            "max_output_tokens": asked.max_tokens,
            "model": self._model,
            "output": self._output,
            "previous_response_id": None,
            "store": False,
            "temperature": asked.sampling.temperature,
            "top_p": asked.sampling.top_p,
            "truncation": "disabled",
            "usage": None
            if status in ("in_progress", "failed")
            else {
                "input_tokens": usage.prompt,
                "input_tokens_details": {
                    "cached_tokens": usage.cached,
                    "cache_write_tokens": 0,  # what is kept is not counted, nor paid for
                    "text_tokens": usage.prompt - usage.image,
                    "image_tokens": usage.image,
                },
                "output_tokens": usage.completion,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt + usage.completion,
            },
        }

    def _event(self, kind: str, **body: Any) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": self._sequence, **body})
        self._sequence += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
