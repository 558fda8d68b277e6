"""A part loads its own weights and nothing else; broken checkpoints say what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from epd.errors import EpdError, ErrorKind
from epd.models.checkpoint import load_part
from epd.models.spec import fingerprint, read_spec
from tests.tiny import FAMILIES

Tiny = Callable[..., Path]
Copy = Callable[..., Path]


@pytest.fixture
def copy(tiny_checkpoint: Tiny, tmp_path: Path) -> Copy:
    """A private copy of a tiny checkpoint, to be broken."""

    def make(family: str = "qwen3_vl") -> Path:
        return Path(shutil.copytree(tiny_checkpoint(family), tmp_path / "copy"))

    return make


def _names(module: torch.nn.Module) -> set[str]:
    return {name for name, _ in module.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_are_disjoint_and_together_the_whole_model(
    tiny_checkpoint: Tiny, family: str
) -> None:
    from transformers import AutoModelForImageTextToText

    path = tiny_checkpoint(family)
    whole = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    encode, lm = load_part(path, "encode"), load_part(path, "lm")
    embeddings = {n for n in _names(lm) if "embed_tokens" in n or n.startswith("lm_head")}
    assert embeddings
    assert not _names(encode) & _names(lm)
    assert _names(encode) | _names(lm) == _names(whole)
    expected = dict(whole.named_parameters(remove_duplicate=False))
    for part in (encode, lm):
        for name, value in part.named_parameters():
            assert torch.equal(value, expected[name]), name
    assert not any("visual" in n or "vision" in n or "projector" in n for n in _names(lm))
    assert not any("language_model" in n or "text_model" in n for n in _names(encode))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("part", ["encode", "lm"])
def test_dtype_is_the_asked_one(tiny_checkpoint: Tiny, family: str, part: str) -> None:
    for dtype in ("float32", "bfloat16"):
        model = load_part(tiny_checkpoint(family), part, dtype)  # type: ignore[arg-type]
        assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
        assert not model.training
        assert not any(p.requires_grad for p in model.parameters())


def test_tied_head_shares_memory_with_the_embedding(tiny_checkpoint: Tiny) -> None:
    lm: Any = load_part(tiny_checkpoint("qwen2_vl"), "lm")
    head, embedding = lm.get_output_embeddings().weight, lm.get_input_embeddings().weight
    assert head.data_ptr() == embedding.data_ptr()


def test_the_absent_part_can_not_be_called(tiny_checkpoint: Tiny) -> None:
    encode: Any = load_part(tiny_checkpoint("qwen3_vl"), "encode")
    with pytest.raises(RuntimeError, match="not loaded in this process"):
        encode.get_decoder()(None)


def test_sharded_checkpoint(copy: Copy) -> None:
    folder = copy()
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, inside in shards.items():
        save_file({n: weights[n] for n in inside}, folder / file, {"format": "pt"})
    index = {
        "metadata": {},
        "weight_map": {n: file for file, inside in shards.items() for n in inside},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    model = load_part(folder, "encode")
    for name, value in model.named_parameters():
        assert torch.equal(value, weights[name])
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(EpdError, match=r"model-2\.safetensors: this weights file is missing"):
        load_part(folder, "lm")


def _remove(folder: Path, name: str) -> None:
    (folder / name).unlink()


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def _garbage(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 4096)


def _edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _lose_a_weight(folder: Path) -> None:
    _edit_weights(folder, lambda w: w.pop("model.language_model.layers.1.mlp.up_proj.weight"))


def _add_a_weight(folder: Path) -> None:
    _edit_weights(folder, lambda w: w.update({"model.language_model.extra": torch.zeros(2)}))


def _reshape_a_weight(folder: Path) -> None:
    _edit_weights(folder, lambda w: w.update({"model.language_model.norm.weight": torch.zeros(7)}))


@pytest.mark.parametrize(
    ("breaking", "reason"),
    [
        (lambda f: _remove(f, "config.json"), "no config.json"),
        (lambda f: _remove(f, "model.safetensors"), "model.safetensors: this weights file is"),
        (lambda f: (f / "config.json").write_text("{"), "config.json can't be used"),
        (lambda f: (f / "config.json").write_text("[]"), "config.json can't be used"),
        (lambda f: (f / "config.json").write_text("{}"), "config.json can't be used"),
        (_truncate, "model.safetensors: this weights file is cut off"),
        (_garbage, "model.safetensors: not a safetensors file"),
        (_lose_a_weight, "missing keys: model.language_model.layers.1.mlp.up_proj.weight"),
        (_add_a_weight, "unexpected keys: model.language_model.extra"),
        (_reshape_a_weight, "mismatched keys: model.language_model.norm.weight"),
    ],
)
def test_broken_checkpoint_names_the_reason(
    copy: Copy, breaking: Callable[[Path], object], reason: str
) -> None:
    folder = copy()
    breaking(folder)
    with pytest.raises(EpdError) as caught:
        load_part(folder, "lm")
    assert caught.value.kind is ErrorKind.INVALID_REQUEST
    assert reason in caught.value.message
    assert str(folder) in caught.value.message


def test_missing_folder() -> None:
    with pytest.raises(EpdError, match="no such folder"):
        read_spec("/nowhere/at/all")


def test_the_other_parts_damage_does_not_matter(copy: Copy) -> None:
    folder = copy()
    _lose_a_weight(folder)
    load_part(folder, "encode")


def test_fingerprint_sees_every_byte_and_no_path(copy: Copy, tiny_checkpoint: Tiny) -> None:
    folder = copy()
    first = fingerprint(folder, "float32")
    assert first == fingerprint(tiny_checkpoint("qwen3_vl"), "float32")
    assert len(bytes.fromhex(first)) == 32
    assert first != fingerprint(folder, "bfloat16")
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    second = fingerprint(folder, "float32")
    assert second != first
    config = folder / "config.json"
    config.write_text(config.read_text() + "\n")
    assert fingerprint(folder, "float32") not in (first, second)
