"""POST /tokenize and /detokenize: the gateway's own view; no stage and no cache is touched."""

from __future__ import annotations

from typing import Any

from epd.errors import invalid
from gateway.budget import Hold
from gateway.chat import ChatService
from gateway.schema import ChatCall


async def tokenize(
    service: ChatService, call: ChatCall, request_id: str, hold: Hold
) -> dict[str, Any]:
    """Ids of a prompt, or of messages as the chat template renders them.

    Raises:
        EpdError: the user's fault, naming the field.
    """
    service.check_model(call.model)
    request = await service.plan(call, request_id, hold)
    return {
        "tokens": list(request.token_ids),
        "count": len(request.token_ids),
        "image_tokens": request.image_tokens,
        "max_model_len": service.preparer.max_context,
    }


def detokenize(service: ChatService, call: ChatCall) -> dict[str, Any]:
    """The text of ids, control tokens included.

    Raises:
        EpdError: another model is meant.
    """
    service.check_model(call.model)
    ids = call.prompt
    assert isinstance(ids, tuple)
    return {"prompt": service.tokenizer.decode(list(ids), skip_special_tokens=False)}


def check_count(count: int, most: int, param: str) -> None:
    """Raises EpdError: more ids than the context holds; their text takes long to make."""
    if count > most:
        raise invalid(f"{param}: {count} ids, the context holds {most}", param)
