"""One frozen configuration tree. All limits of the service are here and nowhere else.

One file, however long: it is the reference of all keys that docs/operations.md leads to.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from epd.cpus import parse_cpus

_Port = Annotated[int, Field(ge=1, le=65535)]
_Host = Annotated[str, Field(min_length=1)]
"""To a socket "" is every address, and a variable that isn't set is "" in an environment."""
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/?#@\s]+")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^/?#@:\s\[\]]+)(:[0-9]+)?")
_MOST = (1 << 31) - 1
"""What gRPC, torch and the kernel count in 32 bits: more is a slip, that fails far from here."""
_MOST_S = 1e6
"""Eleven days: gRPC counts milliseconds so."""
_MOST_PROCESSES = _MOST_THREADS = 1024


class _Section(BaseModel):
    # Infinite times can't be waited for: clocks and gRPC count in whole units.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """`port = true` is a mistake, and not port 1."""
        field = cls.model_fields[info.field_name or ""]
        if isinstance(value, bool) and field.annotation in (int, float):
            raise ValueError("must be a number, not true or false")
        return value

    @field_validator("*")
    @classmethod
    def _usable(cls, value: Any, info: ValidationInfo) -> Any:
        """Numbers that can be counted, hosts that can be looked up."""
        name = info.field_name or ""
        most = _MOST_S if name.endswith("_s") else _MOST
        if isinstance(value, int | float) and value > most:
            raise ValueError(f"must be at most {most:.0f}")
        if isinstance(value, str) and name.endswith("host"):
            _require_host(value)
        return value


def _require_host(name: str) -> None:
    """Raises ValueError for what sockets would raise one for."""
    try:
        name.encode("idna")
    except UnicodeError:
        raise ValueError(f"{name!r} is no host name") from None
    if not name.isprintable() or any(map(str.isspace, name)):
        raise ValueError(f"{name!r} is no host name")


class _ProcessSection(_Section):
    cpus: str = ""
    """Cores that this process and its helpers may use, e.g. "0" or "0,2-4"; "": all."""

    @field_validator("cpus")
    @classmethod
    def _readable(cls, value: str) -> str:
        parse_cpus(value)
        return value


class _StageSection(_ProcessSection):
    threads: int = Field(0, ge=0, le=_MOST_THREADS)
    """torch threads of this stage; 0: `model.threads`."""


class ModelConfig(_Section):
    path: str = ""
    """Folder of the checkpoint (transformers format)."""
    name: str = ""
    """Id that clients use; default: the folder's name."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "cpu"
    exact: bool = False
    """Batch-invariant numerics: same bits whatever the batch and the chunks."""
    threads: int = Field(1, ge=1, le=_MOST_THREADS)
    """torch threads of one stage process. On purpose 1: stages share the cores."""
    kernels: Literal["auto", "off"] = "auto"
    """"auto": compiled kernels where the CPU has AVX512_BF16, a compiler is there and the
    model is bfloat16. "off": torch only. See docs/kernels.md."""
    quantize: Literal["off", "int8", "int8-decode"] = "off"
    """Weights of the language model's linear layers, on CPUs. "int8": in prefill and
    decode. "int8-decode": in decode only, which then reads keys and values that prefill
    computed with plain weights; without it the two refuse each other. docs/kernels.md."""

    def quantize_in(self, stage: str) -> Literal["off", "int8", "int8-decode"]:
        """What `quantize` means for one stage's language model."""
        alone = self.quantize == "int8-decode" and stage != "decode"
        return "off" if alone else self.quantize

    @model_validator(mode="after")
    def _exact_is_one_arithmetic(self) -> Self:
        if self.exact and self.quantize == "int8-decode":
            raise ValueError(
                "exact promises the same bits from prefill and decode; int8-decode computes "
                "them with other weights: choose int8"
            )
        return self


class KvConfig(_Section):
    block_tokens: int = Field(32, ge=1)
    """Tokens in a block: page, hash unit and transfer unit."""
    prefill_tokens: int = Field(16384, ge=64)
    """Size of prefill's pool, in tokens."""
    decode_tokens: int = Field(16384, ge=64)


class EncodeConfig(_StageSection):
    batch_patches: int = Field(256, ge=1)
    """Most vision patches in one forward; a larger image runs alone. On a CPU more bring no
    speed (from 256 on), and every image of the batch waits for all: prefill idles meanwhile.
    A GPU wants more."""
    arena_mib: int = Field(256, ge=1)
    """Registered memory for finished embeddings."""
    cache_mib: int = Field(256, ge=0)
    """Of the arena: embeddings that are kept after their readers are done, for the next
    request with that picture. They give way when a new one needs the place. 0: nothing
    is kept, and equal pictures in flight are encoded each on its own."""
    max_queue: int = Field(256, ge=1)
    max_queue_mib: int = Field(512, ge=1)
    """Image files that wait, all together."""
    decode_workers: int = Field(2, ge=1, le=_MOST_PROCESSES)
    """Processes that decode and resize pictures. With one, a slow file delays all others."""
    decode_cpu_s: float = Field(10.0, gt=0)
    """CPU time that one picture may take to decode and resize; then its process is killed."""
    decode_memory_mib: int = Field(2048, ge=64)
    """Memory that one picture may take to decode and resize."""


class PrefillConfig(_StageSection):
    step_tokens: int = Field(512, ge=1)
    """Token budget of one forward over all requests."""
    chunk_tokens: int = Field(512, ge=1)
    """Most tokens of one request in one forward."""
    step_ms: float = Field(250.0, ge=0)
    """What a forward should take: the budget shrinks to it, by measurement, since a
    cancelled request goes on until the running forward is done. 0: always step_tokens."""
    lone_step_ms: float = Field(1000.0, ge=0)
    """The same while nobody waits for the forward's end: there is one request, and no answer
    runs in this process. Larger chunks cost less a token. Less than step_ms: no difference."""
    overlap: bool = True
    """Compute what is there while other pictures of the request are encoded, and let decode
    read finished blocks meanwhile. False, for measuring and debugging: a request's first
    chunk waits for all its pictures, its reader for the last chunk."""
    landing_mib: int = Field(256, ge=1)
    """Registered memory that embeddings are read into."""
    max_queue: int = Field(256, ge=1)
    max_queue_tokens: int = Field(1 << 19, ge=1)
    """Of all prompts that wait, together: what a newcomer has before it."""
    prefix_cache: bool = True
    """Keep computed KV blocks for later prompts that start alike. They take no memory
    that a running request could use."""
    embedding_cache: bool = True
    """Keep pictures' rows in landing memory for later requests, and share one read among
    requests that wait for the same picture."""


class DecodeConfig(_StageSection):
    max_running: int = Field(64, ge=1)
    """Most sequences in one forward."""
    max_queue: int = Field(256, ge=1)
    prefix_cache: bool = True
    """Keep KV blocks, read or made here, so that only those that lack are read: the next
    turn of a conversation, another answer to the same prompt. They take no memory that a
    running sequence could use."""


class TransferConfig(_Section):
    host: _Host = "127.0.0.1"
    """Address that peers reach this worker's transfer engine at."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """What must be in use; another transport than this is refused at start."""
    read_deadline_s: float = Field(5.0, gt=0)
    quarantine_margin_s: float = Field(1.0, ge=0)
    connect_timeout_s: float = Field(3.0, gt=0)
    backoff_s: float = Field(1.0, gt=0)
    """How long a peer that could not be reached is left alone."""
    port_min: int = Field(0, ge=0, le=65535)
    """Range of Mooncake's own ports; 0: the end of its default range, 15000 to 17000."""
    port_max: int = Field(0, ge=0, le=65535)
    staging: Literal["auto", "always"] = "auto"
    """Where KV blocks are read to and from. "auto": the pool itself if it is host memory,
    else a mirror of it in pinned host memory. "always": a mirror on CPUs, too, which costs
    memory and copies and shows on any machine that the mirror's path works."""
    networks: tuple[str, ...] = Field((), max_length=64)
    """Networks ("10.1.0.0/24") that peers may come from; packets from elsewhere to Mooncake's
    ports are dropped. None: from anywhere that reaches `host`'s interface."""

    @property
    def port_range(self) -> tuple[int, int]:
        """First and last of Mooncake's ports."""
        return self.port_min or 15000, self.port_max or 17000

    @model_validator(mode="after")
    def _room_for_two_ports(self) -> Self:
        low, high = self.port_range
        if low >= high:
            raise ValueError(f"port_min to port_max is {low} to {high}; an engine takes two ports")
        return self


class LimitsConfig(_Section):
    max_context: int = Field(0, ge=0)
    """Prompt + output tokens of one request; 0: what the model and pools hold."""
    max_images: int = Field(16, ge=0)
    max_image_bytes: int = Field(20 << 20, ge=1)
    max_image_pixels: int = Field(24_000_000, ge=1)
    """Checked in the header, before any decoding."""
    max_image_scans: int = Field(64, ge=1)
    """Scans of a progressive JPEG; each costs a pass over the picture, and 20 bytes."""
    low_detail_pixels: int = Field(512 * 512, ge=1)
    """A picture with detail "low" is reduced to so many pixels; with any other never."""
    max_aspect_ratio: float = Field(200.0, ge=1)
    max_body_bytes: int = Field(64 << 20, ge=1)
    max_messages: int = Field(1024, ge=1)
    max_parts: int = Field(4096, ge=1)
    """Content parts and tool calls of all messages together."""
    max_stop_strings: int = Field(16, ge=1)
    max_stop_length: int = Field(256, ge=1)
    max_top_logprobs: int = Field(20, ge=0, le=256)
    max_grammar_bytes: int = Field(64 << 10, ge=1)
    """A JSON schema, regular expression or list of choices."""
    max_choices: int = Field(16, ge=1, le=128)
    """`n`: answers to one prompt. Each takes a place in decode of its own."""
    max_tools: int = Field(128, ge=0)
    max_tools_bytes: int = Field(1 << 20, ge=1)
    """Descriptions and schemas of all tools together; the prompt holds them."""
    max_logit_biases: int = Field(1024, ge=1)
    """Entries of `logit_bias`."""
    max_stop_token_ids: int = Field(256, ge=1)
    max_guided_choices: int = Field(1024, ge=1)
    default_max_tokens: int = Field(256, ge=1)
    max_inflight: int = Field(256, ge=1)
    """Requests that one gateway works on; more get 429."""
    max_inflight_mib: int = Field(512, ge=1)
    """Bodies and fetched images of all requests in flight, together; more get 429."""
    request_deadline_s: float = Field(300.0, gt=0)


class GatewayConfig(_ProcessSection):
    host: _Host = "127.0.0.1"
    http_port: int = Field(8000, ge=0, le=65535)
    grpc_port: int = Field(8001, ge=0, le=65535)
    """Public gRPC API."""
    membership_port: int = Field(8002, ge=0, le=65535)
    """Workers register here."""
    membership_host: str = ""
    """Where that port listens; "": `host` (`epd serve`: loopback)."""
    metrics_host: _Host = "127.0.0.1"
    """Where `metrics_port` listens: plain HTTP with counts, no contents."""
    metrics_port: int = Field(0, ge=0, le=65535)
    """/metrics, /ready and /debug/state without TLS and keys; 0: any free port."""
    heartbeat_s: float = Field(0.5, gt=0)
    dead_s: float = Field(2.0, gt=0)
    cancel_bound_s: float = Field(6.0, gt=0)
    """How long to wait for a reader's ReadsTerminal."""
    max_connections: int = Field(2048, ge=1)
    """HTTP connections; one more is answered 503 and closed."""
    head_s: float = Field(10.0, gt=0)
    """Time for a request's line and headers to arrive; then 408."""
    head_bytes: int = Field(64 << 10, ge=1 << 10)
    body_s: float = Field(60.0, gt=0)
    """Time for a request's body (or gRPC message) to arrive; then 408."""
    ping_s: float = Field(15.0, ge=0)
    """A stream that has nothing to say for so long says ": ping"; 0: never."""
    slow_reader_s: float = Field(30.0, gt=0)
    """A client that takes nothing of its answer for so long is cut off."""
    body_workers: int = Field(2, ge=1, le=_MOST_PROCESSES)
    """Processes that read large request bodies (over 1 MiB, or of thousands of values)."""
    header_workers: int = Field(2, ge=1, le=_MOST_PROCESSES)
    """Processes that read the headers of picture files."""
    preprocess_workers: int = Field(1, ge=0, le=_MOST_PROCESSES)
    """Processes that build prompts; 0: in the gateway's own process, without the two bounds
    that follow."""
    prompt_cpu_s: float = Field(20.0, gt=0)
    """CPU time that building one prompt may take (its text, tools, pictures' sizes)."""
    prompt_mib: int = Field(1024, ge=64)
    """Memory that building one prompt may take."""
    api_keys: tuple[str, ...] = Field((), repr=False)
    """Bearer tokens that may call; none: anybody may. Better from a file or the
    environment than from a flag, which other users of the machine can see."""
    requests_per_minute: int = Field(0, ge=0)
    """Of one key; 0: no limit."""
    concurrent_requests: int = Field(0, ge=0)
    """Of one key; 0: no limit."""
    hold_s: float = Field(5.0, ge=0)
    """How long a request of a key that gives up most of its requests waits at most, while
    other keys' run, before anything is done for it; 0: never."""
    recover_s: float = Field(10.0, ge=0)
    """How long an answer that its client has a part of waits for a worker when the last one of
    a stage is gone."""
    cors_origins: tuple[str, ...] = ()
    """Web pages' origins whose scripts may call; none: no page may."""
    tls_cert: str = ""
    """PEM file with the certificates of the public ports (HTTP and gRPC); "": no TLS."""
    tls_key: str = ""
    tls_client_ca: str = ""
    """PEM file: only clients with a certificate from here may connect (mTLS)."""

    @field_validator("api_keys")
    @classmethod
    def _can_be_sent(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        if not all(key.isascii() and key.isprintable() and key.strip() == key for key in keys):
            raise ValueError("a key has characters that no header can hold: printable ASCII only")
        if "" in keys:
            raise ValueError("a key is empty: whoever sends none would have it")
        if any("," in key for key in keys):
            raise ValueError("a key has a comma, at which lists are split: it would be several")
        return keys

    @field_validator("cors_origins")
    @classmethod
    def _as_browsers_write_them(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is no origin: https://a.example, without a path, or *"
                )
        return origins


class FetchConfig(_Section):
    """Image URLs: who may be asked for pictures, and for how much."""

    mode: Literal["off", "allow-list", "public"] = "off"
    """"allow-list": only `hosts`; "public": any host on the public internet."""
    hosts: tuple[str, ...] = ()
    """Names ("example.com", "*.example.com"); with ":port" where it isn't one of `ports`."""
    ports: tuple[_Port, ...] = (80, 443)
    max_bytes: int = Field(20 << 20, ge=1)
    total_s: float = Field(10.0, gt=0)
    """One deadline for the whole fetch: waiting, DNS, connecting, redirects, body."""
    max_redirects: int = Field(3, ge=0)
    concurrency: int = Field(16, ge=1)
    """Fetches under way in one gateway; each may hold `max_bytes`."""
    per_host: int = Field(4, ge=1)
    allow_private: bool = False
    """Also dial addresses that are not public. For tests, or a list of inner hosts."""

    @field_validator("hosts")
    @classmethod
    def _names_not_urls(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if not _HOST.fullmatch(host):
                raise ValueError(f"{host!r} is no host: a.example, *.a.example or a.example:8080")
        return hosts


class WorkerConfig(_Section):
    host: _Host = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)
    """gRPC port; 0: any free one."""
    gateways: tuple[str, ...] = ()
    """Membership addresses ("host:port") to register at."""
    grace_s: float = Field(10.0, ge=0)
    """After SIGTERM, how long running work may go on."""
    stall_s: float = Field(10.0, gt=0)
    """Work without a step for this long is NOT_SERVING."""
    wedged_s: float = Field(60.0, ge=0)
    """Work without a step for this long ends the process, so that another starts and its
    requests go elsewhere; 0: never. No forward may take so long: an image may, on a CPU. The
    same of an event loop that stands still, the gateway's too."""
    turns_file: str = ""
    """Stage processes of one host that name one file here take turns: each forward has all
    of its threads' cores to itself. For processes that share cores; "": no turns."""
    metrics_host: str = ""
    """Where `metrics_port` listens: plain HTTP with counts, no contents; "": `host`."""
    metrics_port: int = Field(0, ge=-1, le=65535)
    """/metrics, /ready and /debug/state of a worker; 0: any free port, -1: none."""


class ServeConfig(_Section):
    """`epd serve` only: how many processes of each stage, and how they are kept up."""

    encode: int = Field(1, ge=0, le=_MOST_PROCESSES)
    prefill: int = Field(1, ge=1, le=_MOST_PROCESSES)
    decode: int = Field(1, ge=1, le=_MOST_PROCESSES)
    stages: tuple[str, ...] = ()
    """Processes by the stages that they host, in place of the three counts, e.g.
    ("encode", "prefill+decode", "decode")."""
    turns: bool = False
    """The stage processes take turns on the cores (`worker.turns_file`, made and removed
    here). With `model.threads` as many as there are cores."""
    start_timeout_s: float = Field(180.0, gt=0)
    """A process that isn't ready after this long has failed to start."""
    restart: bool = True
    """Start a process again that died."""
    preload: bool = True
    """Import torch, transformers and the model's classes once, for all processes (CPU only)."""
    backoff_s: float = Field(0.5, gt=0)
    """Wait before the first restart; doubles up to 30 s, until it has run for a minute."""


class LogConfig(_Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


class RpcConfig(_Section):
    control_bytes: int = Field(1 << 20, ge=1 << 16)
    """Largest control message (prompt ids of a long prompt fit)."""
    encode_bytes: int = Field(32 << 20, ge=1 << 20)
    """Largest message to encode (it holds an image file)."""
    keepalive_s: float = Field(10.0, gt=0)
    """A connection that was silent for this long is asked whether it lives, and ends, with
    all its calls, when a question isn't answered for as long again."""
    tls_cert: str = ""
    """PEM file with this part's certificate chain, for all connections between gateways and
    workers, in both roles; "": plain. With it `tls_key` and `tls_ca` are needed."""
    tls_key: str = ""
    tls_ca: str = ""
    """PEM file: the authority of all parts. Whoever holds a certificate of it is obeyed."""
    tls_name: str = ""
    """Name that every part's certificate has; "": the host that is dialled."""
    insecure: bool = False
    """Plain ports between gateways and workers even where other machines reach them."""


class Config(_Section):
    model: ModelConfig = ModelConfig()
    kv: KvConfig = KvConfig()
    encode: EncodeConfig = EncodeConfig()
    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()
    transfer: TransferConfig = TransferConfig()
    limits: LimitsConfig = LimitsConfig()
    gateway: GatewayConfig = GatewayConfig()
    fetch: FetchConfig = FetchConfig()
    worker: WorkerConfig = WorkerConfig()
    rpc: RpcConfig = RpcConfig()
    serve: ServeConfig = ServeConfig()
    log: LogConfig = LogConfig()

    def for_stages(self, stages: Sequence[str]) -> Config:
        """As a process of these stages takes it: their own number of threads, of several
        the largest."""
        own = max(getattr(self, stage).threads for stage in stages)
        threads = own or self.model.threads
        return self.model_copy(update={"model": self.model.model_copy(update={"threads": threads})})
