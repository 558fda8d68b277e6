"""OpenVINO GenAI behind an OpenAI-compatible API, for `bench.compare`.

    VENV/bin/python -m bench.peers.openvino_server MODEL --port 8000 [--threads 2]

Runs in the rival's own environment. Streamed, greedy chat completions of texts and of pictures
in data URLs, no more than a benchmark asks for. The engine's Python binding holds the
interpreter's lock while it encodes a picture and while it steps, so it has a process of its own.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import itertools
import json
import multiprocessing
import os
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from bench.peers.openvino_engine import Asked, Came, serve

MODEL_NAME = "m"


class Engine:
    """The engine's process, as the connections' threads see it."""

    def __init__(self, model: str, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        context.Process(target=serve, args=(model, threads, theirs), daemon=True).start()
        theirs.close()
        self._pipe.recv()
        self._sending = threading.Lock()
        self._answers: dict[int, queue.SimpleQueue[Came]] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    def answer(self, asked: Asked) -> Iterator[Came]:
        """Up to the one with `finish` or `error`; leaving it before cancels the request."""
        box = self._answers[asked.number] = queue.SimpleQueue()
        ended = False
        try:
            self._send(asked)
            while not ended:
                came = box.get()
                ended = bool(came.finish or came.error)
                yield came
        finally:
            del self._answers[asked.number]
            if not ended:
                self._send(asked.number)

    def _send(self, what: Asked | int) -> None:
        with self._sending:
            self._pipe.send(what)

    def _listen(self) -> None:
        try:
            while True:
                for came in self._pipe.recv():
                    if box := self._answers.get(came.number):
                        box.put(came)
        except (EOFError, OSError):
            os._exit(1)  # without its engine there is nothing to serve


class Handler(BaseHTTPRequestHandler):
    """One request a connection (HTTP/1.0)."""

    engine: ClassVar[Engine]
    tokenizer: ClassVar[Any]
    numbers: ClassVar[Iterator[int]] = itertools.count()
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        if self.path == "/health":
            self._reply(200, {})
        elif self.path == "/v1/models":
            self._reply(200, {"object": "list", "data": [{"id": MODEL_NAME, "object": "model"}]})
        else:
            self._reply(404, {"error": {"message": f"no {self.path}"}})

    def do_POST(self) -> None:
        try:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked = read_request(body, next(self.numbers))
        except (ValueError, LookupError, TypeError, OSError) as error:
            self._reply(400, {"error": {"message": repr(error)}})
            return
        with contextlib.suppress(ConnectionError):  # the client left: `answer` is closed
            self._head(200, "text/event-stream")
            for event in events(self.engine.answer(asked), asked, self.tokenizer):
                self._event(json.dumps(event))
            self._event("[DONE]")

    def _event(self, data: str) -> None:
        self.wfile.write(f"data: {data}\n\n".encode())

    def _reply(self, status: int, document: dict[str, Any]) -> None:
        self._head(status, "application/json")
        self.wfile.write(json.dumps(document).encode())

    def _head(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Not a line a request."""


def read_request(body: dict[str, Any], number: int) -> Asked:
    """Raises ValueError, LookupError, TypeError or OSError where it can't be served."""
    if not body["stream"]:
        raise ValueError("only streams")
    pictures: list[Any] = []
    messages = []
    for message in body["messages"]:
        content = message["content"]
        if not isinstance(content, str):
            pictures += [read_picture(p["image_url"]["url"]) for p in content if "image_url" in p]
            content = [{"type": "image"} if "image_url" in part else part for part in content]
        messages.append({"role": message["role"], "content": content})
    ignore_eos, logprobs = bool(body.get("ignore_eos")), bool(body.get("logprobs"))
    return Asked(number, messages, pictures, int(body["max_tokens"]), ignore_eos, logprobs)


def read_picture(url: str) -> Any:
    """(1, height, width, 3) uint8."""
    import numpy
    from PIL import Image

    _, found, data = url.partition(";base64,")
    if not found:
        raise ValueError("only pictures in base64 data URLs")
    return numpy.array(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))[None]


def events(answer: Iterator[Came], asked: Asked, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Chunks of a chat completion; usage in the last."""
    from tokenizers.decoders import DecodeStream

    text = DecodeStream(skip_special_tokens=True)
    head: dict[str, Any] = {"id": f"chatcmpl-{asked.number}", "object": "chat.completion.chunk"}
    head |= {"created": 0, "model": MODEL_NAME}
    total = 0
    for came in answer:
        if came.error:
            yield {"error": {"message": came.error}}
            continue
        total += len(came.ids)
        content = "".join(text.step(tokenizer, token) or "" for token in came.ids)
        choice: dict[str, Any] = {"index": 0, "delta": {"content": content}}
        choice["finish_reason"] = came.finish or None
        if asked.logprobs:
            pairs = zip(came.ids, came.logprobs, strict=True)
            each = [{"token": f"token_id:{i}", "logprob": p, "top_logprobs": []} for i, p in pairs]
            choice["logprobs"] = {"content": each}
        if came.ids or came.finish:
            yield head | {"choices": [choice]}
        if came.finish:
            usage = {"prompt_tokens": came.prompt_tokens, "completion_tokens": total}
            yield head | {"choices": [], "usage": usage}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a folder that optimum-cli exported")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    from tokenizers import Tokenizer

    Handler.tokenizer = Tokenizer.from_file(str(given.model / "tokenizer.json"))
    Handler.engine = Engine(str(given.model), given.threads)
    with ThreadingHTTPServer(("127.0.0.1", given.port), Handler) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
