"""Random weights whose greedy answers vary, saved as a transformers checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.tiny.architectures import ARCHITECTURES

FAMILIES: tuple[str, ...] = tuple(ARCHITECTURES)


def build(
    family: str, folder: str | Path, dtype: str = "float32", seed: int = 0, **text: Any
) -> Path:
    """Save a tiny random checkpoint of `family` to `folder`, and return the folder.

    Equal arguments give equal bytes. It has everything that a downloaded checkpoint
    has: weights, config, generation config, tokenizer, chat template, image processor.
    `text` changes the language model's config.
    """
    import transformers as hf
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    folder = Path(folder)
    architecture = ARCHITECTURES[family]()
    for name, value in text.items():
        setattr(architecture.config.text_config, name, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(hf, architecture.model_class)(architecture.config).eval()
    _randomise(model, seed)
    tokenizer = architecture.processor.tokenizer
    model.generation_config.eos_token_id = [tokenizer.eos_token_id]
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    architecture.processor.save_pretrained(folder)
    _image_config_beside(folder, architecture.processor.image_processor)
    return folder


def _randomise(model: torch.nn.Module, seed: int) -> None:
    """Every parameter non-trivial: norms and zero-initialised ones too, or a bug there is silent.

    Matrices keep the variance of what they are given, so that answers vary with the
    whole prompt instead of repeating one token.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.copy_(noise * min(0.2, 1.3 / parameter.shape[-1] ** 0.5))
            elif "norm" in name or "ln" in name:
                parameter.add_(noise * 0.1)
            else:
                parameter.copy_(noise * 0.1)


def _image_config_beside(folder: Path, image_processor: Any) -> None:
    """Downloaded checkpoints have preprocessor_config.json; transformers 5 saves it elsewhere."""
    config = image_processor.to_dict()
    name = str(config["image_processor_type"]).removesuffix("Pil")
    config["image_processor_type"] = name
    (folder / "preprocessor_config.json").write_text(json.dumps(config, indent=2, default=str))
