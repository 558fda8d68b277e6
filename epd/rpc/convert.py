"""Values: protobuf <-> domain. Jobs, with their checks, are in `epd.rpc.jobs`.

`x_to_proto` and `x_from_proto` are inverse to each other. What a peer sent is
never trusted: shapes, lengths and ranges are checked here, and the error names
the field as it is called in the proto.
"""

from __future__ import annotations

from epd.errors import invalid, too_many
from epd.jobs import (
    FinishReason,
    Grammar,
    GrammarKind,
    ImageItem,
    SampledToken,
    SamplingParams,
    StageTiming,
)
from epd.transfer.contract import Contract, Handle, Peer, Span
from protos.epd.v1 import common_pb2 as pb

DIGEST_BYTES = 32
_MAX_SPANS = 1 << 16
_MAX_DIMS = 8
_MAX_NAME = 256
"""Characters of addresses, layouts and the like."""
_MAX_ENDING_IDS = 256
_MAX_TOP = 256

_FINISH_TO_PROTO = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
_FINISH_FROM_PROTO = {value: key for key, value in _FINISH_TO_PROTO.items()}


def sampling_to_proto(params: SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        seed=params.seed,
        choice=params.choice,
        logit_bias=dict(params.logit_bias),
        stop_token_ids=params.stop_token_ids,
        eos_token_ids=params.eos_token_ids,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        top_logprobs=params.top_logprobs,
        grammar=grammar_to_proto(params.grammar),
    )


def grammar_to_proto(grammar: Grammar | None) -> pb.Grammar | None:
    if grammar is None:
        return None
    message = pb.Grammar()
    setattr(message, str(grammar.kind), grammar.text)
    return message


def grammar_from_proto(message: pb.SamplingParams) -> Grammar | None:
    """None where the output is free."""
    kind = message.grammar.WhichOneof("kind") if message.HasField("grammar") else None
    return None if kind is None else Grammar(GrammarKind(kind), getattr(message.grammar, kind))


def sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    """Raises EpdError: more end ids than any model has. All else is the sampler's to
    check (`epd.sampling`)."""
    if len(message.eos_token_ids) > _MAX_ENDING_IDS:
        raise too_many("eos_token_ids", len(message.eos_token_ids), _MAX_ENDING_IDS, "ids")
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        seed=message.seed,
        choice=message.choice,
        logit_bias=dict(message.logit_bias),
        stop_token_ids=tuple(message.stop_token_ids),
        eos_token_ids=tuple(message.eos_token_ids),
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs,
        top_logprobs=message.top_logprobs,
        grammar=grammar_from_proto(message),
    )


def item_to_proto(item: ImageItem) -> pb.ImageItem:
    return pb.ImageItem(
        index=item.index,
        digest=item.digest,
        rows=item.rows,
        grid=item.grid,
        width=item.width,
        height=item.height,
        images_in_request=item.images_in_request,
        max_pixels=item.max_pixels,
    )


def item_from_proto(message: pb.ImageItem, param: str) -> ImageItem:
    """Raises EpdError naming `param`.field."""
    if len(message.digest) != DIGEST_BYTES:
        raise invalid(f"a digest has {DIGEST_BYTES} bytes", f"{param}.digest")
    for name in ("rows", "width", "height", "images_in_request"):
        if getattr(message, name) < 1:
            raise invalid("must be at least 1", f"{param}.{name}")
    if len(message.grid) > _MAX_DIMS:
        raise too_many(f"{param}.grid", len(message.grid), _MAX_DIMS, "dimensions")
    if message.index >= message.images_in_request:
        raise invalid("is not below images_in_request", f"{param}.index")
    return ImageItem(
        index=message.index,
        digest=message.digest,
        rows=message.rows,
        grid=tuple(message.grid),
        width=message.width,
        height=message.height,
        images_in_request=message.images_in_request,
        max_pixels=message.max_pixels,
    )


def handle_to_proto(handle: Handle) -> pb.Handle:
    return pb.Handle(
        owner=pb.Peer(
            session=handle.owner.session,
            epoch=handle.owner.epoch,
            identity_address=handle.owner.identity_address,
        ),
        contract=pb.Contract(
            fingerprint=handle.contract.fingerprint,
            dtype=handle.contract.dtype,
            layout=handle.contract.layout,
            shape=handle.contract.shape,
            nonce=handle.contract.nonce,
        ),
        spans=[
            pb.Span(address=s.address, length=s.length, checksum=s.checksum) for s in handle.spans
        ],
        read_deadline_ms=handle.read_deadline_ms,
    )


def handle_from_proto(message: pb.Handle, param: str) -> Handle:
    """Raises EpdError naming `param`.field. Whether the bytes are the expected ones
    is `Contract.check`'s business."""
    contract = message.contract
    if not 0 < len(message.owner.session) <= _MAX_NAME:
        raise invalid(f"must have 1 to {_MAX_NAME} characters", f"{param}.owner.session")
    for name in ("fingerprint", "dtype", "layout"):
        if (length := len(getattr(contract, name))) > _MAX_NAME:
            raise too_many(f"{param}.contract.{name}", length, _MAX_NAME, "characters")
    if not 1 <= len(message.spans) <= _MAX_SPANS:
        raise invalid(
            f"has {len(message.spans)} spans, must be 1 to {_MAX_SPANS}", f"{param}.spans"
        )
    if len(contract.shape) > _MAX_DIMS:
        raise too_many(f"{param}.contract.shape", len(contract.shape), _MAX_DIMS, "dimensions")
    owner = message.owner
    return Handle(
        owner=Peer(
            session=owner.session, epoch=owner.epoch, identity_address=owner.identity_address
        ),
        contract=Contract(
            fingerprint=contract.fingerprint,
            dtype=contract.dtype,
            layout=contract.layout,
            shape=tuple(contract.shape),
            nonce=contract.nonce,
        ),
        spans=tuple(
            Span(address=s.address, length=s.length, checksum=s.checksum) for s in message.spans
        ),
        read_deadline_ms=message.read_deadline_ms,
    )


def token_to_proto(token: SampledToken) -> pb.Token:
    return pb.Token(
        id=token.id,
        logprob=token.logprob,
        top=[pb.TokenLogprob(id=id_, logprob=logprob) for id_, logprob in token.top],
    )


def token_from_proto(message: pb.Token) -> SampledToken:
    """Raises EpdError: more alternatives than anybody may ask for."""
    if len(message.top) > _MAX_TOP:
        raise too_many("token.top", len(message.top), _MAX_TOP, "alternatives")
    return SampledToken(
        id=message.id,
        logprob=message.logprob if message.HasField("logprob") else None,
        top=tuple((entry.id, entry.logprob) for entry in message.top),
    )


def finish_to_proto(reason: FinishReason | None) -> pb.FinishReason.ValueType:
    return pb.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH_TO_PROTO[reason]


def finish_from_proto(value: pb.FinishReason.ValueType) -> FinishReason | None:
    """None for UNSPECIFIED: the output goes on."""
    return _FINISH_FROM_PROTO.get(value)


def timing_to_proto(timing: StageTiming) -> pb.StageTiming:
    return pb.StageTiming(
        queue_ms=timing.queue_ms,
        run_ms=timing.run_ms,
        transfer_ms=timing.transfer_ms,
        transfer_bytes=timing.transfer_bytes,
        preprocess_ms=timing.preprocess_ms,
    )
