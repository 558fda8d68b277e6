"""Loading one part of a checkpoint.

A process holds the weights of its own part only: the vision tower with its
projector ("encode"), or the language model ("lm"). The other part is replaced by
`Absent` before `from_pretrained` looks for weights, so its bytes are never read.
Weights of the same dtype stay memory-mapped on the CPU.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from epd.errors import invalid
from epd.models.spec import model_config, read_spec, supported_class

Part = Literal["encode", "lm"]


class Absent(nn.Module):
    """Parameterless stand-in for a part that this process does not hold."""

    def forward(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("this part of the model is not loaded in this process")


def load_part(
    path: str | Path, part: Part, dtype: str = "auto", attn: str | None = None
) -> nn.Module:
    """The model with the weights of `part` only, in eval mode, on the CPU.

    It is the model's own class: its top-level `forward` (lm) and
    `get_image_features` (encode) work as in transformers. `attn` names the attention
    implementation; None lets transformers choose.

    Raises:
        EpdError: the folder, its config or its weights are missing, unreadable, or
            not those of a supported model.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    spec = read_spec(path, dtype)
    config = model_config(spec.path)
    cls = _part_class(supported_class(config, spec.path), part)
    options: dict[str, Any] = {} if attn is None else {"attn_implementation": attn}
    try:
        model, info = cls.from_pretrained(
            spec.path,
            dtype=getattr(torch, spec.dtype),
            output_loading_info=True,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # to be told which; _check_complete refuses them
            **options,
        )
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise invalid(f"{path}: the weights can't be loaded: {_first_line(error)}") from error
    except Exception as error:
        if type(error).__name__ != "SafetensorError":
            raise
        raise invalid(f"{path}: a weights file is damaged: {_first_line(error)}") from error
    _check_complete(path, info)
    if part == "lm":
        _drop_loose_parameters(model.base_model)
    model.eval().requires_grad_(False)
    return model  # type: ignore[no-any-return]


def weights_bytes(model: nn.Module) -> int:
    """Bytes of a model's weights, tied ones once."""
    return sum(parameter.nbytes for parameter in model.parameters())


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _check_complete(path: str | Path, info: dict[str, Any]) -> None:
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys", "conversion_errors"):
        if names := info.get(kind):
            plain = sorted(str(name[0] if isinstance(name, tuple) else name) for name in names)
            more = f" and {len(plain) - 3} more" if len(plain) > 3 else ""
            what = f"{kind.replace('_', ' ')}: {', '.join(plain[:3])}{more}"
            raise invalid(f"{path}: the weights don't fit the config: {what}")


def _part_class(cls: Any, part: Part) -> Any:
    """A subclass of `cls` that drops the other part before weights are loaded.

    Name and module stay those of `cls`: transformers looks up the conversion of old
    checkpoints' keys by them and skips it for classes it does not know.
    """

    def __init__(self: Any, config: Any, *args: Any, **options: Any) -> None:
        cls.__init__(self, config, *args, **options)
        _strip(self, part)

    body = {"__init__": __init__, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), body)


def _strip(model: Any, part: Part) -> None:
    """Replace what `part` does not need by `Absent`, and forget its keys and ties."""
    base, prefix = model.base_model, model.base_model_prefix
    decoder = model.get_decoder()
    (lm,) = [name for name, child in base.named_children() if child is decoder]
    if part == "encode":
        gone = [(base, lm, f"{prefix}.{lm}")]
        heads = [name for name, _ in model.named_children() if name != prefix]
        gone += [(model, name, name) for name in heads]
    else:
        vision = [name for name, _ in base.named_children() if name != lm]
        gone = [(base, name, f"{prefix}.{name}") for name in vision]
    for owner, name, _ in gone:
        setattr(owner, name, Absent())
    names = [full for _, _, full in gone]
    ignored = {"^" + re.escape(name) + r"(\.|$)" for name in names}
    model._keys_to_ignore_on_load_unexpected = ignored | set(
        model._keys_to_ignore_on_load_unexpected or ()
    )
    model.all_tied_weights_keys = {
        key: source
        for key, source in model.all_tied_weights_keys.items()
        if not any(key == name or key.startswith(name + ".") for name in names)
    }
    if part == "encode":
        model._tied_weights_keys = None


def _drop_loose_parameters(base: nn.Module) -> None:
    """Drop the base model's own parameters, e.g. LLaVA's `image_newline`: vision's.

    After loading, since transformers initialises the model by their names.
    """
    for name in [name for name, _ in base.named_parameters(recurse=False)]:
        delattr(base, name)
