"""Writing the checkpoint so that `AutoProcessor` and `AutoModelForImageTextToText` load it."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, Qwen2VLImageProcessorPil

from demo.vision import MAX_PIXELS, MEAN, MERGE, MIN_PIXELS, PATCH, STD

# The stock Qwen-VL processors insist on a video processor, hence on torchvision. This class is
# the same image and text processor without one.
PROCESSOR_CLASS = "PaddleOCRVLProcessor"


def save_checkpoint(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Weights in bfloat16, tokenizer, chat template, processor."""
    folder.mkdir(parents=True, exist_ok=True)
    model = copy.deepcopy(model).to(torch.bfloat16)
    for part in (model.config.text_config, model.config.vision_config):
        part.dtype = None  # else a part keeps the float32 of training, against the whole
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for key in ("is_local", "local_files_only"):  # how it was loaded, not what it is
        config.pop(key, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # a name that transformers 4 knows too
    _write(path, config)
    _write(folder / "preprocessor_config.json", _image_processor_config())
    _write(folder / "processor_config.json", {"processor_class": PROCESSOR_CLASS})


def _image_processor_config() -> dict[str, Any]:
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=2,
        image_mean=[MEAN] * 3,
        image_std=[STD] * 3,
    )
    config = processor.to_dict() | {"image_processor_type": "Qwen2VLImageProcessor"}
    return config | {"processor_class": PROCESSOR_CLASS}


def _write(path: Path, config: dict[str, Any]) -> None:
    path.write_text(json.dumps(config, indent=2) + "\n")
