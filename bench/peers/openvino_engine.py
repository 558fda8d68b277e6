"""OpenVINO GenAI's continuous batching as the comparison sets it, in process and as a process.

Runs in the rival's own environment.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

STEP_TOKENS = 2048
CACHE_GB = 2


@dataclass(frozen=True, slots=True)
class Asked:
    number: int
    messages: list[dict[str, Any]]
    """For the chat template; of a picture only its place."""
    pictures: list[Any]
    """Arrays (1, height, width, 3) uint8."""
    tokens: int
    ignore_eos: bool
    logprobs: bool


@dataclass(frozen=True, slots=True)
class Came:
    """Of one request, out of one step."""

    number: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str = ""
    """"stop", "length", or "" while it goes on."""
    prompt_tokens: int = 0
    """Known at the end."""
    error: str = ""


def open_engine(model: str, threads: int) -> Any:
    """Compute and KV cache in bfloat16, as the others: left alone, the plugin keeps keys and
    values in 8 bits."""
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GB
    scheduler.max_num_batched_tokens = STEP_TOKENS
    scheduler.enable_prefix_caching = False  # nothing that is asked comes twice
    options = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "bf16",
        "KV_CACHE_PRECISION": "bf16",
    }
    return genai.ContinuousBatchingPipeline(model, scheduler, "CPU", options)


def serve(model: str, threads: int, pipe: Connection) -> None:
    """Steps while there are requests; takes `Asked`, and numbers to cancel, off the pipe, and
    puts a list of `Came` on it after each step, an empty one when it is up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    engine = open_engine(model, threads)
    pipe.send([])
    running: dict[int, Any] = {}
    while True:
        while not running or pipe.poll():
            if _take(engine, pipe, running):
                break
        if running:
            engine.step()
            pipe.send(list(_arrived(running)))


def _take(engine: Any, pipe: Connection, running: dict[int, Any]) -> bool:
    """Whether a step should come before the next one is taken: a picture is encoded as its
    request comes in, and a burst of them would hold up everyone's next token."""
    asked = pipe.recv()
    if isinstance(asked, int):
        if handle := running.pop(asked, None):
            handle.cancel()
        return False
    try:
        running[asked.number] = _add(engine, asked)
    except RuntimeError as error:
        pipe.send([Came(asked.number, error=str(error))])
    return bool(asked.pictures)


def _add(engine: Any, asked: Asked) -> Any:
    import openvino
    import openvino_genai as genai

    config = genai.GenerationConfig()
    config.max_new_tokens = asked.tokens
    config.do_sample, config.ignore_eos = False, asked.ignore_eos
    config.logprobs = int(asked.logprobs)
    config.apply_chat_template = False  # done here, for all messages
    prompt = engine.get_tokenizer().apply_chat_template(asked.messages, add_generation_prompt=True)
    pictures = [openvino.Tensor(picture) for picture in asked.pictures]
    return engine.add_request(asked.number, prompt, pictures, config)


def _arrived(running: dict[int, Any]) -> Iterator[Came]:
    """What the step brought; requests that ended leave `running`."""
    for number, handle in list(running.items()):
        ids: list[int] = []
        logprobs: list[float] = []
        finish = ""
        while handle.can_read():
            (output,) = handle.read().values()
            ids += output.generated_ids
            logprobs += output.generated_log_probs
            finish = output.finish_reason.name.lower()
        status = handle.get_status().name
        if status == "RUNNING":
            yield Came(number, ids, logprobs)
            continue
        del running[number]
        error = "out of KV cache" if status == "IGNORED" else ""
        prompt_tokens = handle.get_perf_metrics().get_num_input_tokens()
        yield Came(number, ids, logprobs, finish or "stop", prompt_tokens, error)
