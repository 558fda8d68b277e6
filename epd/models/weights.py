"""The weights files of a checkpoint, looked at without loading one: which there are, and
whether each is whole.

A safetensors file is eight bytes (the header's length), the header (JSON: each tensor's
dtype, shape and place) and the tensors, without gaps: so its header says how long it must
be. https://github.com/huggingface/safetensors#format. Imports no torch.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from epd.errors import EpdError, invalid

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PREFIX = struct.Struct("<Q")
_MOST_HEADER_BYTES = 100_000_000
"""safetensors' own limit."""
_LFS = b"version https://git-lfs"
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}

Header = Mapping[str, Mapping[str, Any]]
"""By tensor: its dtype, shape and data_offsets."""


def weight_files(path: str | Path) -> list[Path]:
    """The safetensors files of a checkpoint, in a fixed order, each whole by its header.

    Raises:
        EpdError: there are none, one that the index names is not there or lacks a tensor
            that it should hold, or one is damaged; the message names the file.
    """
    folder = Path(path)
    placed = _placed(folder)
    files = {folder / name: tensors for name, tensors in sorted(placed.items())}
    for file in files:
        if not file.is_file():
            raise _bad(file, "this weights file is missing (only safetensors are read)")
    for file, tensors in files.items():
        inside = read_header(file)
        if lacking := [name for name in tensors if name not in inside]:
            more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
            raise _bad(file, f"{lacking[0]}{more}: {_INDEX} says it is in here, and it isn't")
    return list(files)


def read_header(file: Path) -> Header:
    """The header of one file, after a look at the file's length.

    Raises:
        EpdError: the file is empty, cut off, too long, or not safetensors.
    """
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            return _header(file, stream.read(_PREFIX.size), stream.read, size)
    except OSError as error:
        raise _bad(file, f"can't be read: {error.strerror}") from error


def stored_dtype(file: Path) -> str:
    """dtype of the first floating tensor of a file, in torch's words; "unknown" without one."""
    found = (_DTYPES.get(str(tensor["dtype"])) for tensor in read_header(file).values())
    return next((name for name in found if name), "unknown")


def _placed(folder: Path) -> dict[str, list[str]]:
    """By file name: the tensors that the index says are in it."""
    index = folder / _INDEX
    if not index.is_file():
        return {_SINGLE: []}
    placed: dict[str, list[str]] = {}
    try:
        for tensor, name in json.loads(index.read_bytes())["weight_map"].items():
            placed.setdefault(name, []).append(tensor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _bad(index, "not a readable index of weights") from error
    if not placed or not all(isinstance(name, str) for name in placed):
        raise _bad(index, "not a readable index of weights")
    return placed


def _header(file: Path, prefix: bytes, read: Any, size: int) -> Header:
    if not size:
        raise _bad(file, "this weights file is empty")
    if len(prefix) < _PREFIX.size:
        raise _bad(file, f"this weights file is damaged: it has {size} bytes only")
    (length,) = _PREFIX.unpack(prefix)
    if length > _MOST_HEADER_BYTES:
        rest = prefix + read(len(_LFS))
        if rest.startswith(_LFS):
            raise _bad(file, "a git-lfs pointer, not the weights: run 'git lfs pull'")
        raise _bad(file, "not a safetensors file")
    if size < _PREFIX.size + length:
        raise _cut_off(file, size, _PREFIX.size + length)
    try:
        header = json.loads(read(length))
        tensors = {name: value for name, value in header.items() if name != "__metadata__"}
        ends = [int(tensor["data_offsets"][1]) for tensor in tensors.values() if tensor["dtype"]]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise _bad(file, "this weights file is damaged: its header is not readable") from error
    if size < (needed := _PREFIX.size + length + max(ends, default=0)):
        raise _cut_off(file, size, needed)
    if size > needed:
        raise _bad(file, f"this weights file is damaged: {size - needed} bytes after its end")
    return tensors


def _cut_off(file: Path, size: int, needed: int) -> EpdError:
    what = f"it has {size} bytes, by its header it needs {needed}"
    return _bad(file, f"this weights file is cut off: {what}; copy it again")


def _bad(file: Path, what: str) -> EpdError:
    return invalid(f"{file}: {what}", "model.path")
