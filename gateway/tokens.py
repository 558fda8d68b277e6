"""POST /tokenize and /detokenize: the gateway's own view; no stage and no cache is touched."""

from __future__ import annotations

from typing import Any

from epd.config import LimitsConfig
from epd.errors import invalid
from epd.jobs import SamplingParams
from gateway.budget import Hold
from gateway.chat import ChatService
from gateway.completions import read_ids, read_prompt
from gateway.content import Conversation, read_messages
from gateway.fields import Fields
from gateway.schema import ChatCall, Generation, load_json
from gateway.tools import read_tools


async def tokenize(
    service: ChatService, body: bytes, vocab_size: int, request_id: str, hold: Hold
) -> dict[str, Any]:
    """Ids of a prompt, or of messages as the chat template renders them.

    Raises:
        EpdError: the user's fault, naming the field.
    """
    call = _call(body, service.config.limits, vocab_size)
    service.check_model(call.model)
    request = await service.plan(call, request_id, hold)
    return {
        "tokens": list(request.token_ids),
        "count": len(request.token_ids),
        "image_tokens": request.image_tokens,
        "max_model_len": service.preparer.max_context,
    }


def detokenize(service: ChatService, body: bytes, vocab_size: int) -> dict[str, Any]:
    """The text of ids, control tokens included.

    Raises:
        EpdError: the user's fault; also more ids than any prompt or answer has.
    """
    fields = Fields(load_json(body), "")
    service.check_model(fields.string("model") or "")
    ids = read_ids(fields, "tokens", fields.take("tokens"), vocab_size)
    fields.done()
    check_count(len(ids), service.preparer.max_context, "tokens")
    return {"prompt": service.tokenizer.decode(list(ids), skip_special_tokens=False)}


def check_count(count: int, most: int, param: str) -> None:
    """Raises EpdError: more ids than the context holds; their text takes long to make."""
    if count > most:
        raise invalid(f"{param}: {count} ids, the context holds {most}", param)


def _call(body: bytes, limits: LimitsConfig, vocab_size: int) -> ChatCall:
    fields = Fields(load_json(body), "")
    model = fields.string("model") or ""
    generation = Generation(SamplingParams(), 1, None, ())
    messages = fields.take("messages")
    if messages is None:
        prompt = read_prompt(fields, "prompt", vocab_size)
        call = ChatCall(model, Conversation((), ()), generation, prompt=prompt)
    else:
        conversation, tools = read_messages(messages, limits), read_tools(fields, limits)
        call = ChatCall(model, conversation, generation, tools=tools)
    fields.done()
    return call
