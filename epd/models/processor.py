"""The checkpoint's own processor without torchvision: sizes to tokens, pictures to tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
import transformers.processing_utils as processing
from blake3 import blake3
from PIL import Image
from transformers.utils import is_torchvision_available
from transformers.video_processing_utils import VideoProcessorMixin

from epd.errors import EpdError, ErrorKind, invalid
from epd.models import families
from epd.models.spec import model_config, supported_class

_REMEMBERED_SIZES = 4096
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


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
    """transformers' own processor of a local checkpoint.

    Raises:
        EpdError: tokenizer or processor files are missing or unreadable.
    """
    from transformers import AutoProcessor

    if not any((Path(path) / name).is_file() for name in _TOKENIZER_FILES):
        # transformers would make a tokenizer without a vocabulary
        raise invalid(f"{path}: no tokenizer; expected {_TOKENIZER_FILES[0]}", "model.path")
    try:
        loaded = AutoProcessor.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise invalid(f"{path}: the processor can't be loaded: {reason}", "model.path") from error
    if not hasattr(loaded, "image_processor") or not hasattr(loaded, "tokenizer"):
        raise invalid(f"{path}: no image processor or no tokenizer", "model.path")
    return loaded


@dataclass(frozen=True, slots=True)
class ItemPlan:
    """What an image becomes in the prompt, known from its size alone.

    `grid` is (t, h, w) in vision patches where position rows need it, else ().
    `replacement` is the text that takes the place of one placeholder; it holds `rows`
    image tokens (and in some families others between them).
    """

    rows: int
    grid: tuple[int, ...]
    replacement: str


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """One picture as the vision tower takes it: the arguments of get_image_features.

    Tensors are on the CPU, own their memory and have batch size one. `image_key` says
    whether the picture was lone in its request (see `families.image_key`).
    """

    tensors: dict[str, torch.Tensor]
    rows: int
    grid: tuple[int, ...]
    patches: int
    image_key: int


class Processor:
    """A checkpoint's tokenizer and image processor; safe to use from several threads.

    It is transformers' own processor, called on one picture at a time, so that the
    tensors are those that the model was trained on.
    """

    def __init__(self, hf: Any, spec_family: str, image_token_id: int, patch_size: int) -> None:
        self.hf = hf
        self.tokenizer = hf.tokenizer
        self.image_token_id = image_token_id
        self.image_token: str = hf.image_token
        self.config_digest = b""
        self._family = spec_family
        self._patch_size = patch_size
        self._row_token: str = hf.tokenizer.convert_ids_to_tokens(image_token_id)
        merged = hf._merge_kwargs(tokenizer_init_kwargs=hf.tokenizer.init_kwargs)
        self._options: dict[str, Any] = {**merged["images_kwargs"], "return_tensors": "pt"}
        self._planned = lru_cache(maxsize=_REMEMBERED_SIZES)(self._plan)

    @classmethod
    def load(cls, path: str | Path) -> Processor:
        """Read tokenizer and image processor from a checkpoint's folder.

        Raises:
            EpdError: the family can't be served, or a file is missing or unreadable.
        """
        config = model_config(path)
        supported_class(config, path)
        hf = load_hf_processor(path)
        if hf.tokenizer.convert_ids_to_tokens(config.image_token_id) is None:
            raise invalid(
                f"{path}: the tokenizer has no token {config.image_token_id}, which stands "
                "for an image in config.json",
                "model.path",
            )
        if config.image_token_id not in hf.tokenizer.added_tokens_decoder:
            # It would be an ordinary word, and each use of it a place for an image.
            raise invalid(
                f"{path}: image_token_id {config.image_token_id} of config.json is "
                f"{hf.tokenizer.convert_ids_to_tokens(config.image_token_id)!r}, an ordinary "
                "token of the tokenizer",
                "model.path",
            )
        patch_size = config.vision_config.patch_size
        made = cls(hf, config.model_type, config.image_token_id, patch_size)
        made.config_digest = _config_digest(Path(path))
        return made

    def image_key(self, images_in_request: int) -> int:
        """Part of a picture's identity; see `families.image_key`."""
        return families.image_key(self._family, images_in_request)

    def plan(self, width: int, height: int, images_in_request: int = 1) -> ItemPlan:
        """What a picture of this upright size becomes; its pixels don't matter.

        Where only the grid matters (Qwen) it is computed; else a blank picture of that
        size goes through the image processor, which takes up to half a second for a new
        size of 24 megapixels. Answers are remembered.

        Raises:
            EpdError: INVALID_IMAGE, the model takes no picture of this size.
        """
        return self._planned(width, height, self.image_key(images_in_request))

    def _plan(self, width: int, height: int, key: int) -> ItemPlan:
        with _refusing_size(width, height):
            grid = families.grid_of_size(self.hf.image_processor, width, height)
        if grid is not None:
            text = self.hf.replace_image_token({"image_grid_thw": torch.tensor([grid])}, 0)
            return ItemPlan(text.count(self._row_token), grid, text)
        blank = Image.new("RGB", (width, height))
        data, text = self._process(blank, key, do_rescale=False, do_normalize=False)
        return ItemPlan(text.count(self._row_token), _grid(data), text)

    def prepare(self, image: Image.Image, images_in_request: int = 1) -> PreparedImage:
        """Resize, cut and normalise one upright RGB picture.

        Raises:
            EpdError: INVALID_IMAGE, the model takes no picture of this size.
        """
        key = self.image_key(images_in_request)
        data, text = self._process(image, key)
        unused = (*self.hf.unused_input_names, "rows", "cols")
        tensors = {name: value for name, value in data.items() if name not in unused}
        if key == families.ONE_OF_SEVERAL:  # the second picture was there for the count only
            tensors = {name: value[:1] for name, value in tensors.items()}
        rows = text.count(self._row_token)
        pixels = tensors["pixel_values"]
        patches = pixels.shape[0] if pixels.ndim == 2 else self._patches(pixels)
        return PreparedImage(tensors, rows, _grid(data), patches, key)

    def _patches(self, pixels: torch.Tensor) -> int:
        return pixels.numel() // (pixels.shape[-3] * self._patch_size**2)

    def _process(self, image: Image.Image, key: int, **options: Any) -> tuple[Any, str]:
        """(image processor's output, text that replaces the placeholder) of one picture."""
        several = key == families.ONE_OF_SEVERAL
        pictures = [[image, Image.new("RGB", (2, 2))]] if several else [[image]]
        with _refusing_size(*image.size):
            data, texts = self.hf._process_images(pictures, **{**self._options, **options})
        return data, str(texts[0])


@contextmanager
def _refusing_size(width: int, height: int) -> Iterator[None]:
    """What an image processor raises for a size it can't take is the user's fault."""
    try:
        yield
    except (ValueError, ArithmeticError, IndexError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise EpdError(
            ErrorKind.INVALID_IMAGE,
            f"the model takes no picture of {width} x {height} pixels: {reason}",
        ) from error


def _grid(data: Any) -> tuple[int, ...]:
    grid = data.get("image_grid_thw")
    return () if grid is None else tuple(int(size) for size in grid[0])


def _config_digest(folder: Path) -> bytes:
    """Digest of all that decides which tensors a picture becomes, beside its bytes."""
    digest = blake3(transformers.__version__.encode())
    for name in ("preprocessor_config.json", "processor_config.json"):
        file = folder / name
        content = file.read_bytes() if file.is_file() else b""
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.digest()
