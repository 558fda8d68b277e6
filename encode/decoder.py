"""What runs in encode's sandbox: a file's bytes to the tensors of one picture.

Nothing but this process's workers reads hostile pixels. `load` is called once, in the
zygote; `unpack` is the other side of what `work` returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from PIL import Image

from epd import images
from epd.config import LimitsConfig
from epd.errors import EpdError, ErrorKind
from epd.jobs import ImageItem
from epd.models.processor import PreparedImage, Processor
from epd.sandbox import Reply
from epd.sandbox_worker import Work

PARAM = "job.image"
_ALIGNMENT = 64
_NAMES = {str(dtype): dtype for dtype in (torch.float32, torch.int64, torch.int32, torch.bool)}


def load(path: str, limits: Mapping[str, Any]) -> Work:
    """The work of a checkpoint: `head` holds an item (`describe`), the body is the file."""
    torch.set_num_threads(1)
    processor = Processor.load(path)
    allowed = LimitsConfig.model_validate(limits)
    # What is imported and built at first use is so in every fork.
    processor.prepare(Image.new("RGB", (64, 64)))

    def work(head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], Sequence[memoryview]]:
        return pack(_prepare(processor, allowed, head, body))

    return work


def describe(item: ImageItem) -> dict[str, Any]:
    """What the work needs of an item, as JSON."""
    known = asdict(item)
    return {name: known[name] for name in ("rows", "width", "height", "images_in_request")} | {
        "grid": list(item.grid),
        "max_pixels": item.max_pixels,
    }


def _prepare(
    processor: Processor, limits: LimitsConfig, item: Mapping[str, Any], data: bytes
) -> PreparedImage:
    picture = images.reduce(images.decode(data, limits, PARAM), item["max_pixels"])
    if picture.size != (item["width"], item["height"]):
        planned = f"{item['width']}x{item['height']}"
        raise _lying(planned, f"{picture.width}x{picture.height}")
    prepared = processor.prepare(picture, item["images_in_request"])
    # The prompt was built for this item; a picture of another shape can't fill it.
    if prepared.rows != item["rows"]:
        raise _lying(f"{item['rows']} rows", f"{prepared.rows} rows")
    if prepared.grid != tuple(item["grid"]):
        raise _lying(f"grid {tuple(item['grid'])}", f"grid {prepared.grid}")
    return prepared


def pack(prepared: PreparedImage) -> tuple[dict[str, Any], list[memoryview]]:
    """A head that describes the tensors, and their bytes, each aligned."""
    described, buffers, offset = [], [], 0
    for name, tensor in prepared.tensors.items():
        tensor = tensor.contiguous()
        raw = tensor.flatten().view(torch.uint8)
        described.append([name, str(tensor.dtype), list(tensor.shape), offset])
        padding = -raw.numel() % _ALIGNMENT
        buffers += [memoryview(raw.numpy().data), memoryview(bytes(padding))]
        offset += raw.numel() + padding
    head = {
        "tensors": described,
        "rows": prepared.rows,
        "grid": list(prepared.grid),
        "patches": prepared.patches,
        "image_key": prepared.image_key,
    }
    return head, buffers


def unpack(reply: Reply) -> PreparedImage:
    """Tensors over the reply's own memory; the last of them frees it."""
    tensors = {}
    for name, kind, shape, offset in reply.head["tensors"]:
        dtype = _NAMES[kind]
        count = torch.Size(shape).numel()
        tensors[name] = (
            torch.frombuffer(reply.data, dtype=dtype, count=count, offset=offset).view(shape)
            if count
            else torch.empty(shape, dtype=dtype)
        )
    head = reply.head
    return PreparedImage(
        tensors, head["rows"], tuple(head["grid"]), head["patches"], head["image_key"]
    )


def _lying(planned: str, found: str) -> EpdError:
    return EpdError(
        ErrorKind.INVALID_IMAGE,
        f"the picture is not what its header said: {planned} planned, {found} decoded",
        param=PARAM,
    )
