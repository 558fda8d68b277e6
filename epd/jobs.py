"""What the stages work on: pure data, no protobuf, no torch.

Servicers build these from messages (`epd.rpc.convert`); schedulers and workers
see nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Stage(StrEnum):
    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the whole output must match."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen; see SamplingParams in common.proto."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    choice: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()
    """The client's stop ids; they stop even with ignore_eos."""
    eos_token_ids: tuple[int, ...] = ()
    """The model's own end ids; off with ignore_eos."""
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    grammar: Grammar | None = None

    @property
    def ending_ids(self) -> frozenset[int]:
        """Ids whose sampling ends the output."""
        eos = () if self.ignore_eos else self.eos_token_ids
        return frozenset(self.stop_token_ids) | frozenset(eos)


@dataclass(frozen=True, slots=True)
class ImageItem:
    """One image of a request as planned from its header and bytes."""

    index: int
    digest: bytes
    rows: int
    grid: tuple[int, ...]
    width: int
    height: int
    images_in_request: int
    max_pixels: int = 0
    """Reduce the picture to so many pixels first (`epd.images.reduce`); 0: leave it."""


@dataclass(frozen=True, slots=True)
class EncodeJob:
    request_id: str
    attempt: int
    nonce: int
    item: ImageItem
    image: bytes
    salt: bytes = b""


@dataclass(frozen=True, slots=True)
class PrefillJob:
    request_id: str
    attempt: int
    nonce: int
    token_ids: tuple[int, ...]
    prompt_length: int
    items: tuple[ImageItem, ...]
    sampling: SamplingParams
    decode_follows: bool
    salt: bytes = b""
    choices: int = 1
    """Outputs that start here, with `sampling.choice` and the numbers after it."""

    @property
    def resumed(self) -> bool:
        """Pushed out, or lost, in the middle of its answer: its client has a part of it."""
        return len(self.token_ids) > self.prompt_length


@dataclass(frozen=True, slots=True)
class DecodeJob:
    request_id: str
    attempt: int
    nonce: int
    token_ids: tuple[int, ...]
    prompt_length: int
    items: tuple[ImageItem, ...]
    sampling: SamplingParams
    position_delta: int
    salt: bytes = b""
    arrival_ms: int = 0
    """When the gateway received the request (Unix time); 0: now. Who is youngest."""

    @property
    def resumed(self) -> bool:
        """As in `PrefillJob`."""
        return len(self.token_ids) > self.prompt_length


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One output token. `top` holds (id, logprob), most likely first."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StageTiming:
    queue_ms: float = 0.0
    run_ms: float = 0.0
    transfer_ms: float = 0.0
    transfer_bytes: int = 0
    preprocess_ms: float = 0.0
