"""Language models of shapes that the families' own toys don't have: heads that divide nothing,
sizes that fill no vector, windows, biases, one key/value head for all."""

from __future__ import annotations

from typing import Any

_WINDOWS: dict[str, Any] = {
    "use_sliding_window": True,
    "sliding_window": 9,
    "max_window_layers": 0,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}


def _mrope(*section: int, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(section), **more}


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "five heads of one, windows": (
        "llava_onevision",
        {
            **_WINDOWS,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "intermediate_size": 100,
            "vocab_size": 477,
        },
    ),
    "three heads of three, biases": (
        "idefics3",
        {
            "hidden_size": 66,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 40,
            "intermediate_size": 33,
            "attention_bias": True,
            "mlp_bias": True,
            "num_hidden_layers": 2,
            "vocab_size": 481,
        },
    ),
    "26 heads of one": (
        "qwen3_vl",
        {
            "num_attention_heads": 26,
            "num_key_value_heads": 1,
            "intermediate_size": 65,
            "vocab_size": 511,
        },
    ),
    "eight heads of two, windows": (
        "qwen2_5_vl",
        {
            **_WINDOWS,
            "num_attention_heads": 8,
            "rope_parameters": _mrope(1, 1, 2),
            "vocab_size": 450,
        },
    ),
}
"""Name: (family, changes to its text config)."""
