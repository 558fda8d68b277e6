"""The other side of `gateway.bodies`: reads one body after another (`epd.sandbox`).

    request: the form and what can fit, as JSON; the body
    reply:   bytes of the call, bytes of each picture; then the call as JSON, the pictures

Pictures are decoded here as well, so that none of the reply is as long as the body but files.
What can't fit the context is refused here: it would be copied to and fro before that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson
from pydantic import TypeAdapter

from epd.config import LimitsConfig
from epd.errors import EpdError, ErrorKind, invalid
from epd.sandbox_worker import Buffer, Work
from epd.text.messages import TextPart
from epd.text.words import check_could_fit
from gateway.content import ImageSource
from gateway.fetch import is_web_url
from gateway.forms import Form, parse
from gateway.pictures import file_bytes
from gateway.schema import ChatCall

MEMORY_MIB = 1024
"""For one body: its text, its values, its pictures."""
_NO_PROMPTS = {Form.DETOKENIZE: "tokens", Form.GRPC_DETOKENIZE: "ids"}
"""Forms whose ids are no prompt, and what they are called."""
_PROMPTS = {Form.GRPC_COMPLETE: "ids.ids"}
_CALL: TypeAdapter[ChatCall] = TypeAdapter(ChatCall)


@dataclass(frozen=True, slots=True)
class Room:
    """What can fit: read anew for each body, since workers come and go."""

    context: int
    longest_token: int
    """Characters."""


def load(limits: Mapping[str, Any], vocab_size: int) -> Work:
    """The work of the sandbox."""
    allowed = LimitsConfig.model_validate(limits)

    def work(head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], Sequence[Buffer]]:
        form, room = Form(head["form"]), Room(**head["room"])
        try:
            call = parse(form, body, allowed, vocab_size)
            check_room(form, call, room)
            return packed(call, allowed)
        except MemoryError:
            raise invalid(f"the body takes more than {MEMORY_MIB} MiB to read") from None

    return work


def check_room(form: Form, call: ChatCall, room: Room) -> None:
    """Return unless it is sure that the prompt does not fit.

    Raises:
        EpdError: CONTEXT_LENGTH_EXCEEDED, or INVALID_REQUEST for ids that are no prompt.
    """
    if isinstance(call.prompt, tuple):
        check_ids(form, len(call.prompt), room.context)
        return
    param = "messages" if call.prompt is None else "prompt"
    with call.names.used():
        check_could_fit(_texts(call), room.context, room.longest_token, param)


def check_ids(form: Form, count: int, most: int) -> None:
    """Raises EpdError: more ids than the context holds; a list of each is long to make."""
    if count <= most:
        return
    if (name := _NO_PROMPTS.get(form)) is not None:
        raise invalid(f"{name}: {count} ids, the context holds {most}", name)
    reason = f"the context holds {most} tokens, the prompt has {count}"
    raise EpdError(ErrorKind.CONTEXT_LENGTH_EXCEEDED, reason, param=_PROMPTS.get(form, "prompt"))


def _texts(call: ChatCall) -> Iterable[str]:
    if isinstance(call.prompt, str):
        yield call.prompt
    for message in call.conversation.messages:
        for part in message.parts:
            if isinstance(part, TextPart):
                yield part.text
        for called in message.calls:
            yield called.arguments


def packed(call: ChatCall, limits: LimitsConfig) -> tuple[dict[str, Any], Sequence[Buffer]]:
    """What `unpacked` takes apart.

    Raises:
        EpdError: a picture can't be decoded; `param` names it.
    """
    said = call.conversation
    files = [None if _is_fetched(one) else file_bytes(one, limits) for one in said.images]
    images = [
        one if file is None else replace(one, value="")
        for one, file in zip(said.images, files, strict=True)
    ]
    bare = replace(call, conversation=replace(said, images=tuple(images)), salt=b"")
    text = orjson.dumps(bare, default=_no_bytes, option=orjson.OPT_NON_STR_KEYS)
    sizes = [-1 if file is None else len(file) for file in files]
    return {"call": len(text), "files": sizes}, [text, *(file for file in files if file)]


def unpacked(head: Mapping[str, Any], data: memoryview) -> ChatCall:
    """The call, with pictures as files. Takes its time with large ones: not on the event
    loop. Copies of more than a MiB let other threads run (`bytes.join`)."""
    end = int(head["call"])
    call = _CALL.validate_python(orjson.loads(data[:end]))
    images = []
    for source, size in zip(call.conversation.images, head["files"], strict=True):
        if size >= 0:
            source = replace(source, value=b"".join((data[end : end + size],)))
            end += size
        images.append(source)
    return replace(call, conversation=replace(call.conversation, images=tuple(images)))


def _is_fetched(source: ImageSource) -> bool:
    return isinstance(source.value, str) and is_web_url(source.value)


def _no_bytes(value: Any) -> str:
    assert value == b"", "only the salt is bytes, and it is not the client's"
    return ""
