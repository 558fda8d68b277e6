"""What a checkpoint is, read from its files without loading a weight."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from blake3 import blake3

from epd.errors import invalid
from epd.models import families
from epd.models.weights import stored_dtype, weight_files

_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The facts about a model that all stages must agree on."""

    path: str
    name: str
    """The folder's name; what clients call the model unless configured otherwise."""
    family: str
    """transformers' `model_type`."""
    fingerprint: str
    dtype: str
    vocab_size: int
    """Width of a row of logits; the tokenizer may know fewer ids."""
    hidden: int
    """Width of an embedding row."""
    max_positions: int
    image_token_id: int
    eos_token_ids: tuple[int, ...]
    deepstack_levels: int
    """Embedding planes beside plane 0, one for each early layer that sees the image again."""

    @property
    def planes(self) -> int:
        return 1 + self.deepstack_levels


def read_spec(path: str | Path, dtype: str = "auto") -> ModelSpec:
    """Read the config and hash the weights; no weight is loaded.

    `dtype` "auto" is the dtype that the checkpoint was saved in.

    Raises:
        EpdError: the folder, its config or its weights are missing or unreadable, the dtype
            is not served, or the family can't work; the message says why.
    """
    config = model_config(path)
    supported_class(config, path)
    text, vision = config.get_text_config(), getattr(config, "vision_config", None)
    chosen = _dtype(config, path, dtype)
    return ModelSpec(
        path=str(path),
        name=Path(path).resolve().name,
        family=config.model_type,
        fingerprint=fingerprint(path, chosen),
        dtype=chosen,
        vocab_size=text.vocab_size,
        hidden=text.hidden_size,
        max_positions=text.max_position_embeddings,
        image_token_id=config.image_token_id,
        eos_token_ids=_eos_token_ids(Path(path), config),
        deepstack_levels=len(getattr(vision, "deepstack_visual_indexes", None) or ()),
    )


def model_config(path: str | Path) -> Any:
    """transformers' config of a local folder.

    Raises:
        EpdError: there is no such folder, no config.json in it, or nothing that
            transformers understands.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise invalid(f"{path}: there is no such folder", "model.path")
    if not (folder / "config.json").is_file():
        raise invalid(f"{path}: no config.json, so not a transformers checkpoint", "model.path")
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise invalid(f"{path}: config.json can't be used: {reason}", "model.path") from error


def supported_class(config: Any, path: str | Path) -> Any:
    """transformers' image-text-to-text class for this config.

    Raises:
        EpdError: the family can't be served; the message says why.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    known = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    cls = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)] if known else None
    cls = cls[0] if isinstance(cls, (tuple, list)) else cls
    if reason := families.refusal(config, cls):
        raise invalid(
            f"{path}: models of the family {config.model_type!r} can't be served: {reason}",
            "model.path",
        )
    return cls


def _dtype(config: Any, path: str | Path, wanted: str) -> str:
    saved = str(config.dtype or stored_dtype(weight_files(path)[0])).removeprefix("torch.")
    chosen = saved if wanted == "auto" else wanted
    if chosen not in _DTYPES:
        raise invalid(
            f"{path}: dtype {chosen} is not served; choose one of {', '.join(_DTYPES)}",
            "model.dtype",
        )
    return chosen


def _eos_token_ids(folder: Path, config: Any) -> tuple[int, ...]:
    """generation_config.json wins over config.json, as in transformers' generate()."""
    found = None
    file = folder / "generation_config.json"
    if file.is_file():
        try:
            found = json.loads(file.read_bytes()).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise invalid(f"{file}: not readable JSON", "model.path") from error
    if found is None:
        found = getattr(config, "eos_token_id", None)
    if found is None:
        found = getattr(config.get_text_config(), "eos_token_id", None)
    return tuple(found) if isinstance(found, list) else () if found is None else (int(found),)


def fingerprint(path: str | Path, dtype: str) -> str:
    """Hex digest (blake3, 32 bytes) of config.json, all weights' bytes, and the dtype.

    Two workers with equal fingerprints compute with the same numbers. Files are
    hashed memory-mapped on all cores; the result is kept in this process for as long
    as sizes and modification times stay.

    Raises:
        EpdError: a file is missing or can't be read.
    """
    files = [Path(path) / "config.json", *weight_files(path)]
    try:
        stats = [(str(file), s.st_size, s.st_mtime_ns) for file in files for s in [file.stat()]]
        return _digest(tuple(stats), dtype)
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}"
        raise invalid(f"{path}: can't be read: {reason}", "model.path") from error


@lru_cache(maxsize=8)
def _digest(stats: tuple[tuple[str, int, int], ...], dtype: str) -> str:
    whole = blake3(dtype.encode() + b"\0")
    for file, _, _ in stats:
        one = blake3(max_threads=blake3.AUTO)
        one.update_mmap(file)
        whole.update(one.digest())
    return whole.hexdigest()
