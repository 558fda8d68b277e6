"""Config and processor of each family at toy size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from epd.models.processor import NoVideo  # before transformers: it sets its environment
from tests.tiny.tokenizer import (
    IDEFICS_SPECIALS,
    IDEFICS_TEMPLATE,
    LLAVA_SPECIALS,
    LLAVA_TEMPLATE,
    QWEN_SPECIALS,
    QWEN_TEMPLATE,
    make_tokenizer,
)

HIDDEN = 64
_TEXT: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
}
_VIT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
_QWEN_VIT: dict[str, Any] = {
    "depth": 3,
    "num_heads": 2,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """`model_class` is its name in transformers; `processor` is saved with the weights."""

    model_class: str
    config: Any
    processor: Any


def _qwen_parts(patch: int = 8) -> tuple[Any, Any, dict[str, int]]:
    """(tokenizer, image processor, token ids of the config)."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = make_tokenizer(
        QWEN_SPECIALS,
        "<|im_end|>",
        QWEN_TEMPLATE,
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
    )
    area = patch * patch * 4
    images = Qwen2VLImageProcessorPil(
        patch_size=patch,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": area * 4, "longest_edge": area * 64},
    )
    ids = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    return tokenizer, images, {k: tokenizer.convert_tokens_to_ids(v) for k, v in ids.items()}


def _mrope(**more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3], **more}


def qwen2_vl() -> Architecture:
    import transformers as hf

    tokenizer, images, ids = _qwen_parts()
    config = hf.Qwen2VLConfig(
        text_config={**_TEXT, "vocab_size": len(tokenizer), "rope_parameters": _mrope()},
        vision_config={**_QWEN_VIT, "embed_dim": 32, "hidden_size": HIDDEN, "mlp_ratio": 2},
        tie_word_embeddings=True,  # as the real 2B
        **ids,
    )
    processor = hf.Qwen2VLProcessor(images, tokenizer, NoVideo())
    return Architecture("Qwen2VLForConditionalGeneration", config, processor)


def qwen2_5_vl() -> Architecture:
    import transformers as hf

    tokenizer, images, ids = _qwen_parts()
    config = hf.Qwen2_5_VLConfig(
        text_config={**_TEXT, "vocab_size": len(tokenizer), "rope_parameters": _mrope()},
        vision_config={
            **_QWEN_VIT,
            "hidden_size": 32,
            "out_hidden_size": HIDDEN,
            "intermediate_size": 64,
            "window_size": 32,
            "fullatt_block_indexes": [1],
        },
        tie_word_embeddings=False,
        **ids,
    )
    processor = hf.Qwen2_5_VLProcessor(images, tokenizer, NoVideo())
    return Architecture("Qwen2_5_VLForConditionalGeneration", config, processor)


def qwen3_vl() -> Architecture:
    import transformers as hf

    tokenizer, images, ids = _qwen_parts()
    config = hf.Qwen3VLConfig(
        text_config={
            **_TEXT,
            "head_dim": 16,
            "vocab_size": len(tokenizer),
            "rope_parameters": _mrope(mrope_interleaved=True),
        },
        vision_config={
            **_QWEN_VIT,
            "hidden_size": 32,
            "out_hidden_size": HIDDEN,
            "intermediate_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        tie_word_embeddings=True,
        **ids,
    )
    processor = hf.Qwen3VLProcessor(images, tokenizer, NoVideo())
    return Architecture("Qwen3VLForConditionalGeneration", config, processor)


def llava_onevision() -> Architecture:
    import transformers as hf
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
        LlavaOnevisionImageProcessorPil,
    )

    tokenizer = make_tokenizer(
        LLAVA_SPECIALS, "<|im_end|>", LLAVA_TEMPLATE, image_token="<image>", video_token="<video>"
    )
    pinpoints = [[32 * h, 32 * w] for h in range(1, 5) for w in range(1, 5)]
    config = hf.LlavaOnevisionConfig(
        vision_config={**_VIT, "model_type": "siglip_vision_model", "vision_use_head": False},
        text_config={**_TEXT, "model_type": "qwen2", "vocab_size": len(tokenizer)},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_9",
        image_grid_pinpoints=pinpoints,
        tie_word_embeddings=False,
    )
    processor = hf.LlavaOnevisionProcessor(
        LlavaOnevisionImageProcessorPil(
            size={"height": 32, "width": 32}, image_grid_pinpoints=pinpoints
        ),
        tokenizer,
        NoVideo(),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_9",
    )
    return Architecture("LlavaOnevisionForConditionalGeneration", config, processor)


def _idefics_parts() -> tuple[Any, dict[str, Any]]:
    """(tokenizer, options of the config)."""
    tokenizer = make_tokenizer(
        IDEFICS_SPECIALS,
        "<end_of_utterance>",
        IDEFICS_TEMPLATE,
        image_token="<image>",
        fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
        end_of_utterance_token="<end_of_utterance>",
    )
    pad = tokenizer.pad_token_id
    options = {
        "vision_config": dict(_VIT),
        "text_config": {
            **_TEXT,
            "model_type": "llama",
            "vocab_size": len(tokenizer),
            "pad_token_id": pad,
        },
        "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
        "scale_factor": 2,
        "pad_token_id": pad,
        "tie_word_embeddings": False,
    }
    return tokenizer, options


_IDEFICS_SIZES = {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 32}}


def idefics3() -> Architecture:
    import transformers as hf
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    tokenizer, options = _idefics_parts()
    images = Idefics3ImageProcessorPil(**_IDEFICS_SIZES)
    processor = hf.Idefics3Processor(images, tokenizer, image_seq_len=4)
    config = hf.Idefics3Config(**options)
    return Architecture("Idefics3ForConditionalGeneration", config, processor)


def smolvlm() -> Architecture:
    import transformers as hf
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    tokenizer, options = _idefics_parts()
    options["text_config"]["num_key_value_heads"] = 1  # else it would equal idefics3 bit for bit
    images = SmolVLMImageProcessorPil(**_IDEFICS_SIZES)
    processor = hf.SmolVLMProcessor(images, tokenizer, NoVideo(), image_seq_len=4)
    config = hf.SmolVLMConfig(**options)
    return Architecture("SmolVLMForConditionalGeneration", config, processor)


ARCHITECTURES: dict[str, Callable[[], Architecture]] = {
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "llava_onevision": llava_onevision,
    "idefics3": idefics3,
    "smolvlm": smolvlm,
}
