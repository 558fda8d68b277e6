"""The tokenizer: a byte-level BPE of 1,024 entries and a chat template in Qwen's manner.

Digits stay single tokens and capitals single letters, so that reading a number is spelling it.
"""

import random
from collections.abc import Iterator

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from demo.questions import about_number, about_pair, about_shapes
from demo.scenes import FEW_COUNTS, random_number_scene, random_shapes_scene
from demo.small_talk import without_picture

VOCABULARY = 1024
IMAGE = "<|image_pad|>"
IMAGE_TEXT = f"<|vision_start|>{IMAGE}<|vision_end|>"
SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    IMAGE,
    "<|video_pad|>",
)
CHAT_TEMPLATE = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m['role'] + '\\n' -}}"
    "{%- if m['content'] is string -%}{{- m['content'] -}}"
    "{%- else -%}{%- for c in m['content'] -%}"
    "{%- if c['type'] in ('image', 'image_url') or 'image' in c -%}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}"
    "{%- elif 'text' in c -%}{{- c['text'] -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{{- '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
_WORDS = r"[0-9]|[A-Z](?=[A-Z])| ?[^\s\p{L}\p{N}]+| ?[\p{L}][\p{Ll}\p{M}\p{Lo}]*|\s+(?!\S)|\s+"


def build_tokenizer() -> PreTrainedTokenizerBase:
    """Learn the merges from the questions and answers themselves; round-trips any UTF-8."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_corpus(), trainer)
    bpe.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    assert bpe.get_vocab_size() <= VOCABULARY
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=2048,
        padding_side="left",
        extra_special_tokens={
            "image_token": IMAGE,
            "video_token": "<|video_pad|>",
            "vision_start_token": "<|vision_start|>",
            "vision_end_token": "<|vision_end|>",
        },
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _corpus() -> Iterator[str]:
    rng = random.Random(7)
    for _ in range(4000):
        shapes = random_shapes_scene(rng)
        pair = (random_shapes_scene(rng, FEW_COUNTS), random_shapes_scene(rng, FEW_COUNTS))
        questions = about_shapes(shapes, rng) + about_pair(*pair, rng)
        questions += [*about_number(random_number_scene(rng), rng), without_picture(rng)]
        for question in questions:
            yield question.text
            yield question.answer
    yield from ["system user assistant"] * 2000
    yield from ["You are a helpful assistant. Answer in one short sentence."] * 500
    yield from _general_english()


def _general_english() -> Iterator[str]:
    """Text from the standard library, so that other prompts stay short."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # a Python built without its documentation
        return
    for _, text in sorted(topics.items()):
        yield " ".join(w for w in text.split() if w.isalpha() and w[1:].islower())
