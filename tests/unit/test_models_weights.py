"""Weights files that are not whole are found by their headers, and named."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from epd.errors import EpdError
from epd.models.weights import read_header, stored_dtype, weight_files

TENSORS = {"a.weight": torch.arange(24.0).reshape(4, 6), "b.weight": torch.ones(5)}
Break = Callable[[Path], object]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path / "model.safetensors"


def test_a_whole_file(file: Path) -> None:
    assert weight_files(file.parent) == [file]
    assert set(read_header(file)) == set(TENSORS)
    assert stored_dtype(file) == "float32"


def cut(to: int) -> Break:
    """Keep so many bytes (negative: so many less)."""
    return lambda file: file.write_bytes(file.read_bytes()[:to])


def header(text: str) -> Break:
    return lambda file: file.write_bytes(struct.pack("<Q", len(text)) + text.encode() + b"\0" * 64)


@pytest.mark.parametrize(
    ("breaking", "reason"),
    [
        (cut(0), "this weights file is empty"),
        (cut(5), "it has 5 bytes only"),
        (cut(40), "this weights file is cut off: it has 40 bytes, by its header it needs"),
        (cut(-1), "this weights file is cut off"),
        (cut(-80), "this weights file is cut off"),
        (lambda f: f.write_bytes(f.read_bytes() + b"more"), "4 bytes after its end"),
        (lambda f: f.write_bytes(b"\xff" * 500), "not a safetensors file"),
        (
            lambda f: f.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
            "a git-lfs pointer, not the weights: run 'git lfs pull'",
        ),
        (header("{nope"), "its header is not readable"),
        (header("[]"), "its header is not readable"),
        (header('{"a": {"dtype": "F32"}}'), "its header is not readable"),
        (header('{"a": {"dtype": "F32", "data_offsets": [0]}}'), "its header is not readable"),
        (lambda f: f.unlink(), "this weights file is missing"),
    ],
)
def test_a_file_that_is_not_whole_is_named_with_the_reason(
    file: Path, breaking: Break, reason: str
) -> None:
    breaking(file)
    with pytest.raises(EpdError) as caught:
        weight_files(file.parent)
    assert caught.value.message.startswith(f"{file}: ")
    assert caught.value.message.count(str(file.parent)) == 1
    assert reason in caught.value.message
    assert caught.value.param == "model.path"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two shards and their index."""
    for number, name in enumerate(TENSORS, 1):
        save_file({name: TENSORS[name]}, tmp_path / f"model-{number}.safetensors")
    write_index(tmp_path, {"a.weight": "model-1.safetensors", "b.weight": "model-2.safetensors"})
    return tmp_path


def write_index(folder: Path, placed: object) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": placed}))


def test_shards_in_a_fixed_order(sharded: Path) -> None:
    names = ["model-1.safetensors", "model-2.safetensors"]
    assert weight_files(sharded) == [sharded / name for name in names]


def test_a_shard_that_is_missing_or_cut_off(sharded: Path) -> None:
    shard = sharded / "model-2.safetensors"
    shard.write_bytes(shard.read_bytes()[:-3])
    with pytest.raises(EpdError, match=r"model-2\.safetensors: this weights file is cut off"):
        weight_files(sharded)
    shard.unlink()
    with pytest.raises(EpdError, match=r"model-2\.safetensors: this weights file is missing"):
        weight_files(sharded)


def test_a_tensor_that_is_not_where_the_index_says(sharded: Path) -> None:
    placed = {"a.weight": "model-1.safetensors", "c.weight": "model-2.safetensors"}
    write_index(sharded, placed)
    with pytest.raises(EpdError) as caught:
        weight_files(sharded)
    assert str(sharded / "model-2.safetensors") in caught.value.message
    assert "c.weight" in caught.value.message


@pytest.mark.parametrize("placed", [None, [], {}, {"a": 5}, "x"])
def test_an_index_that_is_none(sharded: Path, placed: object) -> None:
    write_index(sharded, placed)
    with pytest.raises(EpdError, match="not a readable index of weights"):
        weight_files(sharded)
