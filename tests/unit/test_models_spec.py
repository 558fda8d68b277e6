"""What a checkpoint says about itself, and which families are refused with which reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from epd.errors import EpdError
from epd.models import families
from epd.models.spec import read_spec
from tests.tiny import FAMILIES

Tiny = Callable[..., Path]


@pytest.mark.parametrize("family", FAMILIES)
def test_spec_of_each_family(tiny_checkpoint: Tiny, family: str) -> None:
    path = tiny_checkpoint(family)
    spec = read_spec(path)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    image = "<|image_pad|>" if "qwen" in family else "<image>"
    end = "<|im_end|>" if image == "<|image_pad|>" or family == "llava_onevision" else None
    assert spec.family == family
    assert spec.image_token_id == ids[image]
    assert spec.eos_token_ids == (ids[end or "<end_of_utterance>"],)
    assert (spec.dtype, spec.hidden, spec.max_positions) == ("float32", 64, 4096)
    assert spec.planes == (3 if family == "qwen3_vl" else 1)
    assert spec.name == path.name


def test_dtype_auto_is_the_saved_one(tiny_checkpoint: Tiny) -> None:
    path = tiny_checkpoint("qwen2_vl", "bfloat16")
    assert read_spec(path).dtype == "bfloat16"
    assert read_spec(path, "float32").dtype == "float32"
    assert read_spec(path).fingerprint != read_spec(path, "float32").fingerprint


@pytest.fixture
def folder(tiny_checkpoint: Tiny, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint("qwen2_vl"), tmp_path / "copy"))


def _edit(file: Path, **values: Any) -> None:
    content = json.loads(file.read_text())
    for key, value in values.items():
        if value is None:
            content.pop(key, None)
        else:
            content[key] = value
    file.write_text(json.dumps(content))


def test_dtype_is_read_from_the_weights_when_the_config_has_none(folder: Path) -> None:
    _edit(folder / "config.json", dtype=None, text_config=_without_dtype(folder, "text_config"))
    _edit(folder / "config.json", vision_config=_without_dtype(folder, "vision_config"))
    assert read_spec(folder).dtype == "float32"


def _without_dtype(folder: Path, part: str) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())[part]
    return {key: value for key, value in config.items() if key != "dtype"}


def test_half_precision_is_refused_not_converted_silently(folder: Path) -> None:
    _edit(folder / "config.json", dtype="float16")
    with pytest.raises(EpdError, match="float16 is not served"):
        read_spec(folder)
    assert read_spec(folder, "bfloat16").dtype == "bfloat16"


def test_eos_ids_without_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    _edit(folder / "config.json", eos_token_id=[5, 6])
    assert read_spec(folder).eos_token_ids == (5, 6)


def test_eos_ids_of_generation_config_win(folder: Path) -> None:
    _edit(folder / "config.json", eos_token_id=5)
    _edit(folder / "generation_config.json", eos_token_id=[7, 8])
    assert read_spec(folder).eos_token_ids == (7, 8)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "mllama"}, "cross-attention"),
        ({"model_type": "gemma3"}, "both directions"),
        ({"model_type": "paligemma"}, "both directions"),
        ({"model_type": "llama"}, "no image-text-to-text model"),
        ({"model_type": "qwen3_5"}, "linear_attention layers"),
        ({"model_type": "florence2"}, "encoder-decoder"),
        ({"model_type": "internvl"}, "was not compared"),
        ({"model_type": "no_such_model"}, "no_such_model"),
    ],
)
def test_refused_families_say_why(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EpdError) as caught:
        read_spec(tmp_path)
    assert reason in caught.value.message
    assert config["model_type"] in caught.value.message


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_batch_dependent_rope_is_refused(folder: Path, rope_type: str) -> None:
    text = json.loads((folder / "config.json").read_text())["text_config"]
    text["rope_parameters"] = {
        **text["rope_parameters"],
        "rope_type": rope_type,
        "factor": 2.0,
        "long_factor": [1.0] * 8,
        "short_factor": [1.0] * 8,
        "original_max_position_embeddings": 2048,
    }
    _edit(folder / "config.json", text_config=text)
    with pytest.raises(EpdError, match=f"{rope_type} RoPE"):
        read_spec(folder)


def test_only_llava_onevision_asks_for_the_number_of_images() -> None:
    for family in families.PROVEN - {"llava_onevision"}:
        assert families.image_key(family, 1) == families.image_key(family, 5) == 0
    keys = [families.image_key("llava_onevision", n) for n in (1, 2, 3)]
    assert keys[0] != keys[1] == keys[2]
