"""Every picture that a folder's manifest names, by way of the whole service.

``make images MANIFEST=FOLDER``, or ``EPD_MANIFEST=FOLDER pytest tests/cases/test_manifest.py``;
FOLDER holds ``manifest.json``: a list of {"file", "group", "want": decode | reject | policy,
"expect", "pillow": {"upright_size", "mean_rgb", "open_mode", "has_alpha", ...}, "trap"?}. Such
files aren't ours to give away: without the variable nothing runs, and pytest says so.

A picture that is taken must have the manifest's size and mean colours. Where the manifest's
own colours are the trap (Pillow drops alpha and clips 16 bits), the right ones are made here
from the samples, and held to what the manifest says in words. The service must see the very
same picture: its scores are those of a plain PNG of these pixels.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from epd import images
from epd.config import LimitsConfig
from tests.cases.memory import peak_growth
from tests.cases.pictures import ask, distance, file, image_tokens, quad, refused
from tests.e2e.cluster import Cluster
from tests.e2e.member import Reply

MOST_OFF = 8.0
"""Difference of mean colours that JPEG decoders may have."""
MOST_GROWTH = 64 << 20
SAME = 1e-3
QUAD = ((220, 30, 30), (30, 170, 60), (40, 70, 220), (240, 210, 40))
FOLDER = Path(os.environ.get("EPD_MANIFEST", ""))


def named() -> list[Any]:
    """The manifest's entries as parameters, or one that is skipped."""
    if not os.environ.get("EPD_MANIFEST"):
        reason = "no folder of odd files: EPD_MANIFEST (make images MANIFEST=FOLDER) names none"
        return [pytest.param({}, id="files", marks=pytest.mark.skip(reason=reason))]
    entries = json.loads((FOLDER / "manifest.json").read_text())
    assert entries, "a manifest without files proves nothing"
    return [pytest.param(entry, id=Path(entry["file"]).name) for entry in entries]


@pytest.fixture(scope="module")
def totals(pytestconfig: pytest.Config) -> Iterator[Counter[str]]:
    counts: Counter[str] = Counter()
    yield counts
    said = ", ".join(f"{number} {how}" for how, number in sorted(counts.items()))
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else nullcontext():
        print(f"\n{counts.total()} files judged right: {said}")


@pytest.mark.parametrize("entry", named())
def test_a_file_of_the_manifest(
    cluster: Cluster, totals: Counter[str], entry: dict[str, Any]
) -> None:
    data = (FOLDER / entry["file"]).read_bytes()
    bomb = entry["group"] == "bomb"
    if bomb:
        ask(cluster, file(quad()))  # what a first request takes is not the bomb's
    with peak_growth(cluster) if bomb else nullcontext(lambda: 0) as growth:
        reply = ask(cluster, data)
        assert growth() < MOST_GROWTH
    if reply.status == 200:
        assert entry["want"] != "reject"
        check_picture(cluster, entry, data, reply)
        totals["decoded"] += 1
    else:
        assert entry["want"] != "decode", reply.body
        check_refusal(cluster, data, reply)
        totals["refused"] += 1


def check_refusal(cluster: Cluster, data: bytes, reply: Reply) -> None:
    """A 400 that names the part and the trouble, whether the answer is streamed or not."""
    code = reply.error["code"]
    assert code in ("invalid_image", "image_too_large")
    refused(reply, "image", code=code)
    streamed = ask(cluster, data, stream=True)
    assert (streamed.status, streamed.json) == (reply.status, reply.json)


def check_picture(cluster: Cluster, entry: dict[str, Any], data: bytes, reply: Reply) -> None:
    picture = images.decode(data, LimitsConfig(), "manifest")
    known = entry["pillow"]
    if known.get("upright_size"):
        assert list(picture.size) == known["upright_size"]
    wanted = right_mean(known, data)
    if wanted is not None:
        assert np.abs(pixels(picture).mean((0, 1)) - wanted).max() < MOST_OFF
    check_words(f"{entry['expect']}; {entry.get('trap', '')}", picture)
    plain = ask(cluster, file(picture))
    assert distance(reply, plain) < SAME, "the service saw another picture"
    assert image_tokens(reply) == image_tokens(plain) > 0


def pixels(picture: Image.Image) -> np.ndarray[Any, Any]:
    return np.asarray(picture).astype(float)


def right_mean(known: dict[str, Any], data: bytes) -> np.ndarray[Any, Any] | None:
    """Mean red, green, blue; None where the manifest has none (Pillow read no pixels)."""
    if not known.get("mean_rgb"):
        return None
    if known["open_mode"].startswith("I;16"):
        return _of_16_bits(Image.open(io.BytesIO(data)))
    if known.get("has_alpha"):
        rgba = pixels(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGBA"))
        opaque = rgba[..., 3:] / 255
        return (rgba[..., :3] * opaque + 255 * (1 - opaque)).mean((0, 1))
    return np.array(known["mean_rgb"], float)


def _of_16_bits(picture: Image.Image) -> np.ndarray[Any, Any]:
    samples = pixels(picture)
    gray = samples * 255 / 65535
    transparent = picture.info.get("transparency")
    if isinstance(transparent, int):
        gray[samples == transparent] = 255
    return np.full(3, gray.mean())


def check_words(words: str, picture: Image.Image) -> None:
    """What the manifest says of the right picture."""
    shown = pixels(picture)
    if number := re.search(r"right is about (\d+)", words):
        assert np.abs(shown.mean((0, 1)) - float(number[1])).max() < MOST_OFF
    if "TL red, TR green, BL blue, BR yellow" in words:
        places = (shown[:8, :8], shown[:8, -8:], shown[-8:, :8], shown[-8:, -8:])
        for corner, colour in zip(places, QUAD, strict=True):
            assert np.abs(corner.mean((0, 1)) - colour).max() < MOST_OFF
    if "no red bar" in words:
        assert (shown[..., 0] - shown[..., 1]).max() < MOST_OFF
    if "marks visible" in words:
        assert shown.min() < 64, "no marks"
        assert shown.max() > 192, "the ground is black"
    if re.search(r"(not|never) clip(ped)? to white|a ramp, not white", words):
        assert (shown == 255).mean() < 0.5
