"""The forms that a request's JSON body can have, each with its checks; what they become.

No event loop, no network and no checkpoint: this also runs in a process of its own
(`gateway.body_process`).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from epd.config import LimitsConfig
from epd.jobs import SamplingParams
from gateway.completions import parse_completion, read_ids, read_prompt
from gateway.content import Conversation, read_messages
from gateway.fields import Fields
from gateway.responses_api import parse_response
from gateway.schema import ChatCall, Generation, load_json, parse_body
from gateway.tools import read_tools


class Form(StrEnum):
    CHAT = "chat"
    COMPLETION = "completion"
    RESPONSE = "response"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"


def parse(form: Form, body: bytes, limits: LimitsConfig, vocab_size: int) -> ChatCall:
    """Check a JSON body of this form.

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


_PARSERS: dict[Form, Callable[[bytes, LimitsConfig, int], ChatCall]] = {
    Form.CHAT: parse_body,
    Form.COMPLETION: parse_completion,
    Form.RESPONSE: parse_response,
    Form.TOKENIZE: _tokenize,
    Form.DETOKENIZE: _detokenize,
}
