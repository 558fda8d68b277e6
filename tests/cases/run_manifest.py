"""Send every picture of a folder of odd files to a running service, and judge the answers.

``python -m tests.cases.run_manifest FOLDER [--address HOST:PORT]``; FOLDER holds
``manifest.json``: a list of {"file", "group", "want": decode | reject | policy, "expect",
"pillow": {"upright_size", "mean_rgb", ...}, "trap"?}. Without an address a service with the
demo checkpoint is started. Exit code 1 if a file is judged wrong, or a process was lost.

A file that must decode is also decoded here, by the one rule of `epd.images`: its size must
be the manifest's, and its mean colour too, unless the entry says that Pillow's own
conversion is the trap (or drops an alpha channel, which is blended on white here).
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageStat

from epd import images
from epd.config import LimitsConfig
from tests.cases.pictures import body, data_url, image_tokens, part, text
from tests.e2e.cluster import Cluster, Reply, request

_QUAD = ((220, 30, 30), (30, 170, 60), (40, 70, 220), (240, 210, 40))
_MOST_OFF = 8.0
"""Difference of mean colours that JPEG decoders may have."""


@dataclass(frozen=True)
class Verdict:
    file: str
    ok: bool
    said: str


def judge(entry: dict[str, Any], data: bytes, reply: Reply) -> Verdict:
    """Whether the service did with a file what the manifest wants."""
    want, name = entry["want"], entry["file"]
    if reply.status == 200:
        wrong = "" if want != "reject" else "accepted, but must be refused"
        wrong = wrong or _wrong_picture(entry, data)
        wrong = wrong or ("" if image_tokens(reply) > 0 else "no image tokens")
        return Verdict(name, not wrong, wrong or "decoded")
    if reply.status != 400:
        return Verdict(name, False, f"status {reply.status}: {reply.body[:200]!r}")
    error = reply.error
    reason = f"{error['code']}: {error['message']}"
    if want == "decode":
        return Verdict(name, False, f"refused, but must decode: {reason}")
    named = error["param"] == "messages[0].content[0].image_url.url" and "0x" not in reason
    return Verdict(name, named, reason)


def _wrong_picture(entry: dict[str, Any], data: bytes) -> str:
    picture = images.decode(data, LimitsConfig(), "manifest")
    known = entry["pillow"]
    if known.get("upright_size") and list(picture.size) != known["upright_size"]:
        return f"decoded to {picture.size}, not {known['upright_size']}"
    if "TL red, TR green, BL blue, BR yellow" in entry["expect"]:
        off = max(map(_apart, _corners(picture), _QUAD))
        if off > _MOST_OFF:
            return f"a corner's colour is off by {off:.0f}"
    opaque = not Image.open(io.BytesIO(data)).has_transparency_data
    if known.get("mean_rgb") and opaque and not entry.get("trap"):
        off = _apart(ImageStat.Stat(picture).mean, known["mean_rgb"])
        if off > _MOST_OFF:
            return f"mean colour is off by {off:.0f}"
    return ""


def _corners(picture: Image.Image) -> list[Sequence[float]]:
    w, h = picture.width, picture.height
    boxes = [(0, 0), (w - 8, 0), (0, h - 8), (w - 8, h - 8)]
    return [ImageStat.Stat(picture.crop((x, y, x + 8, y + 8))).mean for x, y in boxes]


def _apart(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def run(folder: Path, address: str) -> list[Verdict]:
    """Post each file, stream on and off in turn."""
    model = request(address, "/v1/models").json["data"][0]["id"]
    verdicts = []
    for at, entry in enumerate(json.loads((folder / "manifest.json").read_text())):
        data = (folder / entry["file"]).read_bytes()
        asked = body(part(data_url(data)), text("Describe the image."), max_tokens=1)
        reply = request(address, "/v1/chat/completions", asked | {"model": model})
        if at % 2 and reply.status != 200:  # a refusal must not depend on streaming
            again = request(
                address, "/v1/chat/completions", asked | {"model": model, "stream": True}
            )
            assert (again.status, again.json) == (reply.status, reply.json), entry["file"]
        verdicts.append(judge(entry, data, reply))
    return verdicts


def report(verdicts: list[Verdict]) -> int:
    for verdict in verdicts:
        print(f"{'ok   ' if verdict.ok else 'WRONG'} {verdict.file}: {verdict.said}")
    counts = Counter("decoded" if v.said == "decoded" else "refused" for v in verdicts)
    wrong = sum(not verdict.ok for verdict in verdicts)
    print(f"{len(verdicts)} files: {dict(counts)}, {wrong} wrong")
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--address", default="")
    options = parser.parse_args()
    if options.address:
        return report(run(options.folder, options.address))
    with tempfile.TemporaryDirectory() as logs:
        cluster = Cluster(Path(logs)).start()
        try:
            before = cluster.pids
            code = report(run(options.folder, cluster.address))
            cluster.assert_clean()
            lost = cluster.pids != before or not all(m.alive for m in cluster.members)
            print(f"process ids {'CHANGED' if lost else 'unchanged'}")
            return code or int(lost)
        finally:
            cluster.close()


if __name__ == "__main__":
    sys.exit(main())
