"""Requests and picture files that no one meant, by the thousand.

``python -m tests.cases.fuzz [--examples 10000] [--address HOST:PORT]``, half of them mutated
picture files, half mutated request bodies. Every answer must be 200 or a 4xx with OpenAI's
error object, in time; afterwards the service must be idle, with the processes that it had,
and no larger. Without an address a service with the demo checkpoint is started.

`test_fuzz.py` runs a few dozen of each in every test run.
"""

from __future__ import annotations

import argparse
import base64
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cases.memory import resident
from tests.cases.pictures import body, file, part, quad, text
from tests.e2e.cluster import Cluster
from tests.e2e.member import Reply, request

_MOST_S = 30.0
_MOST_GROWTH = 96 << 20
Send = Callable[[bytes], Reply]

FILES = [
    file(quad()),
    file(quad().convert("P")),
    file(quad().convert("RGBA")),
    file(quad(), "JPEG"),
    file(quad(), "JPEG", progressive=True),
    file(quad(), "WEBP"),
    file(quad(), "WEBP", lossless=True),
    file(quad(), "GIF"),
    file(quad(), "BMP"),
    file(quad(), "TIFF", compression="tiff_lzw"),
    file(quad(), "TIFF", compression="jpeg"),
]
_PLACE = st.floats(0, 1, exclude_max=True)
_BYTES = st.one_of(
    st.binary(max_size=8),
    st.sampled_from([b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", bytes(4), b"\0\0\0\x01"]),
)
_EDIT = st.tuples(st.sampled_from(["put", "insert", "cut", "repeat", "drop"]), _PLACE, _BYTES)


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """A picture file after a few edits: near its beginning, where headers are, or anywhere."""
    data = draw(st.sampled_from(FILES))
    in_front = draw(st.booleans())
    for kind, place, new in draw(st.lists(_EDIT, min_size=1, max_size=4)):
        at = int(place * (place if in_front else 1) * len(data))
        if kind == "put":
            data = data[:at] + new + data[at + len(new) :]
        elif kind == "insert":
            data = data[:at] + new + data[at:]
        elif kind == "cut":
            data = data[:at]
        elif kind == "repeat":
            data = data[:at] + data[at : at + 64] * 20 + data[at + 64 :]
        else:
            data = data[:at] + data[at + max(1, len(new)) :]
    return data


_ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from(["data:", "data:,", "data:;base64,", "http://", "<|image_pad|>", "\ud7ff"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)
FIELDS = [
    "model",
    "messages",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "stop",
    "seed",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "presence_penalty",
    "frequency_penalty",
    "user",
    "tools",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
    "stream",
    "stream_options",
    "response_format",
    "tool_choice",
    "guided_regex",
    "guided_choice",
    "guided_json",
    "timeline",
    "metadata",
    "mm_processor_kwargs",
]


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A request body with a few values replaced, anywhere in it."""
    image = part("data:image/png;base64," + base64.b64encode(FILES[0]).decode())
    asked: dict[str, Any] = {"model": "MODEL", **body(text("Hi"), image, max_tokens=2)}
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            asked[draw(st.sampled_from(FIELDS))] = draw(_ODD)
        else:
            _replace_somewhere(draw, asked)
    return orjson.dumps(asked)


def _replace_somewhere(draw: st.DrawFn, value: Any) -> None:
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = draw(st.sampled_from(keys))
        if not isinstance(value[key], dict | list) or draw(st.integers(0, 3)) == 0:
            value[key] = draw(_ODD)
            return
        value = value[key]


def sender(address: str) -> Send:
    model = str(request(address, "/v1/models").json["data"][0]["id"])

    def send(raw: bytes) -> Reply:
        raw = raw.replace(b'"MODEL"', orjson.dumps(model), 1)
        return request(address, "/v1/chat/completions", raw=raw, timeout_s=_MOST_S)

    return send


def check(reply: Reply) -> int:
    assert reply.status == 200 or 400 <= reply.status < 500, (reply.status, reply.body[:500])
    assert reply.status != 499
    if reply.status != 200:
        error = reply.error
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert "0x" not in error["message"] or error["code"] != "invalid_image"
    return reply.status


def run(send: Send, examples: int) -> Counter[int]:
    """Half files, half bodies; how many answers had which status."""
    counts: Counter[int] = Counter()
    quiet = settings(
        max_examples=max(1, examples // 2),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )

    @quiet
    @given(files())
    def pictures(data: bytes) -> None:
        url = "data:;base64," + base64.b64encode(data).decode()
        asked = {"model": "MODEL", **body(part(url), text("Describe the image."), max_tokens=1)}
        counts[check(send(orjson.dumps(asked)))] += 1

    @quiet
    @given(requests())
    def bodies(raw: bytes) -> None:
        counts[check(send(raw))] += 1

    pictures()
    bodies()
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--address", default="")
    options = parser.parse_args()
    if options.address:
        print(dict(run(sender(options.address), options.examples)))
        return 0
    with tempfile.TemporaryDirectory() as logs:
        cluster = Cluster(Path(logs)).start()
        try:
            send, before = sender(cluster.address), cluster.pids
            run(send, options.examples // 10)  # caches and pools fill first
            start = resident(cluster.pids)
            print(dict(run(send, options.examples)))
            growth = resident(cluster.pids) - start
            print(f"memory of all processes, helpers included: {start >> 20} MiB at first, "
                  f"{growth >> 20} MiB more at the end")  # fmt: skip
            cluster.assert_clean()
            lost = cluster.pids != before or not all(m.alive for m in cluster.members)
            print(f"process ids {'CHANGED' if lost else 'unchanged'}")
            return int(lost or growth > _MOST_GROWTH)
        finally:
            cluster.close()


if __name__ == "__main__":
    sys.exit(main())
