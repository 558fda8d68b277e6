"""The forms that a request can have, as JSON or as a gRPC message: checks, and what it becomes.

No event loop, no network and no checkpoint: this also runs in a process of its own
(`gateway.body_process`).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

from google.protobuf.message import DecodeError

from epd.config import LimitsConfig
from epd.errors import EpdError, invalid
from epd.jobs import SamplingParams
from gateway.completions import parse_completion, read_ids, read_prompt
from gateway.content import Conversation, read_messages
from gateway.fields import Fields
from gateway.grpc_request import chat_call, completion_call, detokenize_call, tokenize_call
from gateway.grpc_wire import bounded
from gateway.responses_api import parse_response
from gateway.schema import ChatCall, Generation, load_json, parse_body
from gateway.tools import read_tools
from protos.epd.v1 import gateway_pb2 as pb

_Parser = Callable[[bytes, LimitsConfig, int], ChatCall]


class Form(StrEnum):
    CHAT = "chat"
    COMPLETION = "completion"
    RESPONSE = "response"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"
    GRPC_CHAT = "/epd.v1.Gateway/Chat"
    GRPC_COMPLETE = "/epd.v1.Gateway/Complete"
    GRPC_TOKENIZE = "/epd.v1.Gateway/Tokenize"
    GRPC_DETOKENIZE = "/epd.v1.Gateway/Detokenize"


def parse(form: Form, body: bytes, limits: LimitsConfig, vocab_size: int) -> ChatCall:
    """Check a body of this form, JSON or a serialized message.

    Raises:
        EpdError: INVALID_REQUEST naming the field (`param`) as the client wrote it.
    """
    return _PARSERS[form](body, limits, vocab_size)


def _tokenize(body: bytes, limits: LimitsConfig, vocab_size: int) -> ChatCall:
    fields = Fields(load_json(body), "")
    model = fields.string("model") or ""
    messages = fields.take("messages")
    if messages is None:
        prompt = read_prompt(fields, "prompt", vocab_size)
        call = ChatCall(model, Conversation((), ()), _nothing(), prompt=prompt)
    else:
        conversation, tools = read_messages(messages, limits), read_tools(fields, limits)
        call = ChatCall(model, conversation, _nothing(), tools=tools)
    fields.done()
    return call


def _detokenize(body: bytes, limits: LimitsConfig, vocab_size: int) -> ChatCall:
    fields = Fields(load_json(body), "")
    model = fields.string("model") or ""
    ids = read_ids(fields, "tokens", fields.take("tokens"), vocab_size)
    fields.done()
    return ChatCall(model, Conversation((), ()), _nothing(), prompt=ids)


def _nothing() -> Generation:
    """These forms have no answer that could be long."""
    return Generation(SamplingParams(), 1, None, ())


def _message(parse: Callable[[bytes], Any], read: Callable[..., ChatCall]) -> _Parser:
    parse = bounded(parse)

    def call(body: bytes, limits: LimitsConfig, vocab_size: int) -> ChatCall:
        try:
            message = parse(body)
        except DecodeError:
            raise no_message() from None
        return read(message, limits, vocab_size)

    return call


def no_message() -> EpdError:
    """For bytes that are none."""
    return invalid("the message is not one of this method's")


_PARSERS: dict[Form, _Parser] = {
    Form.CHAT: parse_body,
    Form.COMPLETION: parse_completion,
    Form.RESPONSE: parse_response,
    Form.TOKENIZE: _tokenize,
    Form.DETOKENIZE: _detokenize,
    Form.GRPC_CHAT: _message(pb.ChatRequest.FromString, chat_call),
    Form.GRPC_COMPLETE: _message(pb.CompletionRequest.FromString, completion_call),
    Form.GRPC_TOKENIZE: _message(pb.TokenizeRequest.FromString, tokenize_call),
    Form.GRPC_DETOKENIZE: _message(pb.DetokenizeRequest.FromString, detokenize_call),
}
