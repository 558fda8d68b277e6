"""The checkpoint's own processor without torchvision: sizes to tokens, pictures to tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers.processing_utils as processing
from transformers.utils import is_torchvision_available
from transformers.video_processing_utils import VideoProcessorMixin

from epd.models import spec as _spec  # sets transformers' environment first  # noqa: F401


class NoVideo(VideoProcessorMixin):
    """Stands in for a video processor, all of which need torchvision; takes no video."""

    merge_size = 2
    temporal_patch_size = 2
    num_frames = None
    fps = None

    def __init__(self, **_: Any) -> None:
        pass

    @classmethod
    def from_pretrained(cls, *_: Any, **__: Any) -> NoVideo:
        return cls()

    def preprocess(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("video input is not served")

    def to_dict(self) -> dict[str, Any]:
        return {}


class _WithoutVideo(type(processing.MODALITY_TO_AUTOPROCESSOR_MAPPING)):  # type: ignore[misc]
    """transformers' map from a processor's attribute to the class that loads it."""

    def __getitem__(self, key: str) -> Any:
        return NoVideo if key == "video_processor" else super().__getitem__(key)


def _install_shim() -> None:
    """Let transformers build its processors where torchvision is missing.

    Their constructors insist on a video processor, and those import torchvision.
    transformers has no switch for that, so two of its tables are replaced, and the
    check of that one argument; pictures and text go through untouched.
    """
    if is_torchvision_available() or isinstance(
        processing.MODALITY_TO_AUTOPROCESSOR_MAPPING, _WithoutVideo
    ):
        return
    processing.MODALITY_TO_AUTOPROCESSOR_MAPPING = _WithoutVideo()
    original = processing.ProcessorMixin.check_argument_for_proper_class

    def check(self: Any, name: str, argument: Any) -> Any:
        return VideoProcessorMixin if name == "video_processor" else original(self, name, argument)

    processing.ProcessorMixin.check_argument_for_proper_class = check
    import transformers.models.smolvlm.processing_smolvlm as smolvlm

    if smolvlm.num2words is None:  # it spells the number of a video's frames; no video here
        smolvlm.num2words = _no_video


def _no_video(*_: Any) -> str:
    raise NotImplementedError("video input is not served")


_install_shim()


def load_hf_processor(path: str | Path) -> Any:
    """transformers' own processor of a local checkpoint."""
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(str(path), local_files_only=True)
