"""One answer in the form of /v1/responses: items, and the events that tell how they grow."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import orjson

from epd.errors import EpdError
from epd.jobs import FinishReason
from epd.text.vocabulary import Vocabulary
from gateway.answer import Answer, Part


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
