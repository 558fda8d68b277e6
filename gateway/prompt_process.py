"""The other side of `gateway.prompts`: ``python -m gateway.prompt_process FD MODEL BOUNDS``.

It loads the checkpoint's processor, then answers one request after another on a socket. The
kernel ends it when one takes more CPU time than the bounds say, whatever code it is in.

    frame:   bytes of the JSON, the JSON
    request: {"do": "facts"} | {"do": "build", ...} | {"do": "encode", ...}
    reply:   {"facts": ...} | {"plan": ...} | {"error": ...} of the user | {"fault": ...} of ours

The two ends are one program's, so what arrives is not checked again.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from epd.config import ModelConfig
from epd.errors import EpdError, invalid
from epd.lifetime import die_with_expected_parent
from epd.models.spec import ModelSpec
from epd.sandbox_worker import allow_cpu, allow_memory, receive_exactly
from epd.text.messages import ChatMessage, ImagePart, ImageSize, TextPart, Tool, ToolCall
from epd.text.prompt import ItemRows, PromptBuilder, PromptPlan
from gateway.checkpoint import Facts, read

LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one prompt: see `GatewayConfig`."""

    cpu_s: float
    mib: int


def frame(message: Mapping[str, Any]) -> bytes:
    body = orjson.dumps(message)
    return LENGTH.pack(len(body)) + body


def build_request(
    messages: Sequence[ChatMessage],
    sizes: Sequence[ImageSize],
    max_tokens: int,
    tools: Sequence[Tool],
) -> dict[str, Any]:
    asked = {"messages": messages, "sizes": sizes, "max_tokens": max_tokens, "tools": tools}
    return {"do": "build", **asked}


def encode_request(text: str, max_tokens: int) -> dict[str, Any]:
    return {"do": "encode", "text": text, "max_tokens": max_tokens}


FACTS_REQUEST = {"do": "facts"}


def plan_of(reply: Mapping[str, Any]) -> PromptPlan:
    """Raises EpdError: the user's fault."""
    found = _result(reply)["plan"]
    items = tuple(ItemRows(rows, tuple(grid)) for rows, grid in found["items"])
    return PromptPlan(tuple(found["ids"]), items)


def facts_of(reply: Mapping[str, Any]) -> Facts:
    """Raises EpdError: the checkpoint can't be used."""
    found = _result(reply)["facts"]
    spec = found["spec"]
    spec["eos_token_ids"] = tuple(spec["eos_token_ids"])
    return Facts(ModelSpec(**spec), bytes.fromhex(found["digest"]), found["tokenizer"])


def _result(reply: Mapping[str, Any]) -> Mapping[str, Any]:
    if (error := reply.get("error")) is not None:
        raise EpdError.from_json(error)
    if "fault" in reply:
        raise RuntimeError(f"in a prompt process: {reply['fault']}")
    return reply


class _Answers:
    """What a process says; it reads its checkpoint when it is first asked."""

    def __init__(self, model: ModelConfig, bounds: Bounds) -> None:
        self._model = model
        self._bounds = bounds
        self._read: tuple[Facts, PromptBuilder] | None = None

    def to(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return self._to(request)
        except EpdError as error:
            return {"error": error.as_json()}
        except MemoryError:
            field = "prompt" if request["do"] == "encode" else "messages"
            reason = f"{field}: the prompt takes more than {self._bounds.mib} MiB to build"
            return {"error": invalid(reason, field).as_json()}
        except Exception as error:
            traceback.print_exc()
            return {"fault": f"{type(error).__name__}: {error}"[:500]}

    def _to(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self._read is None:
            self._read = read(self._model)
            allow_memory(self._bounds.mib << 20)
        allow_cpu(self._bounds.cpu_s)  # for this request; loading is not the client's
        facts, builder = self._read
        if request["do"] == "facts":
            digest = facts.processor_digest.hex()
            return {"facts": {"spec": facts.spec, "digest": digest, "tokenizer": facts.tokenizer}}
        if request["do"] == "encode":
            return _plan_reply(builder.encode(request["text"], request["max_tokens"]))
        sizes = [ImageSize(**size) for size in request["sizes"]]
        tools = [Tool(**tool) for tool in request["tools"]]
        messages = [_message(message) for message in request["messages"]]
        return _plan_reply(builder.build(messages, sizes, request["max_tokens"], tools))


def _plan_reply(plan: PromptPlan) -> dict[str, Any]:
    items = [(item.rows, item.grid) for item in plan.items]
    return {"plan": {"ids": plan.token_ids, "items": items}}


def _message(found: Mapping[str, Any]) -> ChatMessage:
    parts = tuple(
        TextPart(part["text"]) if "text" in part else ImagePart(part["index"])
        for part in found["parts"]
    )
    calls = tuple(ToolCall(**call) for call in found["calls"])
    return ChatMessage(found["role"], parts, calls, found["name"])


def command(fd: int, model: ModelConfig, bounds: Bounds) -> list[str]:
    """How such a process is started."""
    told = (model.model_dump_json(), orjson.dumps(bounds).decode())
    return [sys.executable, "-m", "gateway.prompt_process", str(fd), *told]


def main(fd: int, model: ModelConfig, bounds: Bounds) -> None:
    die_with_expected_parent()
    # Ctrl-C goes to the whole group; the gateway drains and then ends its processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # running out of time is no crash
    channel = socket.socket(fileno=fd)
    answers = _Answers(model, bounds)
    # Whoever waits in a read is also woken when the gateway takes an answer out of the socket;
    # whoever waits for something to read is not.
    readable = select.poll()
    readable.register(channel, select.POLLIN)
    try:
        while True:
            readable.poll()
            (length,) = LENGTH.unpack(receive_exactly(channel, LENGTH.size))
            request = orjson.loads(receive_exactly(channel, length))
            channel.sendall(frame(answers.to(request)))
    except (EOFError, OSError):
        pass  # the gateway is gone, or wants nothing more
    # Taking torch's modules apart takes a second and frees nothing that the kernel does not.
    os._exit(0)


if __name__ == "__main__":
    main(
        int(sys.argv[1]),
        ModelConfig.model_validate_json(sys.argv[2]),
        Bounds(**orjson.loads(sys.argv[3])),
    )
