"""What a gateway knows of a checkpoint.

Finding it out takes torch and transformers: four seconds of CPU time and 300 MB that
nothing in the gateway's own process needs. So a prompt process does it (`Facts` is what
crosses the border), and the gateway itself imports neither.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer

from epd.config import ModelConfig
from epd.errors import invalid
from epd.models import families
from epd.models.spec import ModelSpec, read_spec
from epd.text.prompt import PromptBuilder


@dataclass(frozen=True, slots=True)
class Facts:
    """Read from the files, no weights (but their digest)."""

    spec: ModelSpec
    processor_digest: bytes
    """Of all that decides which tensors a picture becomes, beside its bytes."""
    tokenizer: str
    """The tokenizer as transformers loaded it, as JSON."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """`builder` is None where prompts are built in other processes only."""

    spec: ModelSpec
    processor_digest: bytes
    tokenizer: Tokenizer
    longest_token: int
    """Characters."""
    builder: PromptBuilder | None = None

    @classmethod
    def of(cls, facts: Facts, builder: PromptBuilder | None = None) -> Loaded:
        tokenizer = Tokenizer.from_str(facts.tokenizer)
        longest = max(map(len, tokenizer.get_vocab()), default=1)
        return cls(facts.spec, facts.processor_digest, tokenizer, longest, builder)

    def image_key(self, images_in_request: int) -> int:
        """Part of a picture's identity; see `families.image_key`."""
        return families.image_key(self.spec.family, images_in_request)


def read(model: ModelConfig) -> tuple[Facts, PromptBuilder]:
    """Read config, tokenizer and processor in this process: imports torch.

    Raises:
        EpdError: something is missing, the family can't be served, or the chat template
            can't be used.
    """
    from epd.models.processor import Processor

    if not model.path:
        raise invalid("model.path: no checkpoint given", "model.path")
    processor = Processor.load(model.path)
    builder = PromptBuilder.of(processor)
    tokenizer = processor.tokenizer.backend_tokenizer.to_str()
    spec = read_spec(model.path, model.dtype)
    return Facts(spec, processor.config_digest, tokenizer), builder


def load(model: ModelConfig) -> Loaded:
    """`read`, for a gateway that builds its prompts in its own process."""
    return Loaded.of(*read(model))
