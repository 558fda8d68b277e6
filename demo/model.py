"""The network: Qwen3-VL's architecture at 2.45 M parameters, and its training forward."""

import sys
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerBase

from demo.rows import NOT_TRAINED, Batch
from demo.tokenizer import SPECIALS, VOCABULARY
from demo.vision import LABELS, MAX_SIDE, MERGE, PATCH

HIDDEN, HEAD = 128, 32


def build_model(tokenizer: PreTrainedTokenizerBase) -> Any:
    """A freshly initialised `Qwen3VLForConditionalGeneration`."""
    special = {s: tokenizer.convert_tokens_to_ids(s) for s in SPECIALS}
    config = AutoConfig.for_model(
        "qwen3_vl",
        text_config=_text_config(special),
        vision_config=_vision_config(),
        image_token_id=special["<|image_pad|>"],
        video_token_id=special["<|video_pad|>"],
        vision_start_token_id=special["<|vision_start|>"],
        vision_end_token_id=special["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa")
    generation = model.generation_config
    generation.eos_token_id = [special["<|im_end|>"], special["<|endoftext|>"]]
    generation.pad_token_id, generation.bos_token_id = special["<|endoftext|>"], None
    generation.do_sample, generation.max_new_tokens = False, 96
    return model


def _text_config(special: dict[str, int]) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": HIDDEN // HEAD,
        "num_key_value_heads": 2,
        "head_dim": HEAD,
        "max_position_embeddings": 2048,
        "initializer_range": 0.04,
        "rms_norm_eps": 1e-6,
        "bos_token_id": None,
        "eos_token_id": special["<|im_end|>"],
        "pad_token_id": special["<|endoftext|>"],
        "tie_word_embeddings": True,
        # A small head has few rotary frequencies and three axes share them: with a large theta
        # the width axis would hardly turn at all.
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    }


def _vision_config() -> dict[str, Any]:
    return {
        "depth": 4,
        "hidden_size": HIDDEN,
        "intermediate_size": 384,
        "num_heads": 4,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": HIDDEN,
        "initializer_range": 0.04,
        "num_position_embeddings": (MAX_SIDE // PATCH) ** 2,
        "deepstack_visual_indexes": [1],
    }


class PaddedVisionAttention:
    """Replaces the vision attention's loop over pictures by one padded, masked call.

    For training only: the same numbers with far fewer kernel calls. Active between `use` and
    `stop`; at other times the model's own code runs.
    """

    def __init__(self, model: Any) -> None:
        self._index: torch.Tensor | None = None
        attentions = [block.attn for block in model.model.visual.blocks]
        module = sys.modules[type(attentions[0]).__module__]
        self._rotary = module.apply_rotary_pos_emb_vision
        for attention in attentions:
            attention.forward = self._replacement(attention, attention.forward)

    def _replacement(self, module: Any, original: Any) -> Any:
        def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if self._index is None:
                return original(x, *args, **kwargs)
            return self._padded(module, x, kwargs["position_embeddings"])

        return forward

    def use(self, grids: torch.Tensor) -> None:
        lengths = grids[:, 1] * grids[:, 2]
        offsets = torch.cumsum(lengths, 0) - lengths
        slot = torch.arange(int(lengths.max()))
        self._valid = slot[None] < lengths[:, None]
        self._index = offsets[:, None] + torch.minimum(slot[None], lengths[:, None] - 1)
        self._mask = (self._valid[:, :, None] == self._valid[:, None, :])[:, None]

    def stop(self) -> None:
        self._index = None

    def _padded(self, module: Any, x: torch.Tensor, rotary: Any) -> torch.Tensor:
        n = x.shape[0]
        q, k, v = module.qkv(x).reshape(n, 3, module.num_heads, -1).unbind(1)
        q, k = self._rotary(q, k, *rotary)
        q, k, v = (t[self._index].transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask, scale=module.scaling)
        return module.proj(out.transpose(1, 2)[self._valid].reshape(n, -1))


class LabelHead(torch.nn.Module):
    """A training aid, thrown away afterwards: says what each image token shows.

    It teaches the vision tower to put kind, colour, size, place and digits into its output long
    before the language model has learned to ask for them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(HIDDEN, sum(LABELS.values()))

    def loss(self, visual: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.linear(F.rms_norm(visual, visual.shape[-1:])).float()
        total = logits.new_zeros(())
        parts = logits.split(list(LABELS.values()), -1)
        for i, (name, part) in enumerate(zip(LABELS, parts, strict=True)):
            weight = torch.ones(LABELS[name])
            if name != "background":
                weight[0] = 0.2  # most tokens show nothing
            total = total + F.cross_entropy(part, labels[:, i], weight=weight)
        return total


def train_forward(
    model: Any, batch: Batch, attention: PaddedVisionAttention, head: LabelHead | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> (logits at the trained positions in reading order, loss of `head`)."""
    core = model.model
    embeddings = core.language_model.embed_tokens(batch.ids_BL)
    label_loss = torch.zeros(())
    deepstack: dict[str, Any] = {}
    if batch.patches is not None:
        attention.use(batch.grids)
        out = core.visual(batch.patches, grid_thw=batch.grids)
        attention.stop()
        if head is not None:
            label_loss = head.loss(out.pooler_output, batch.labels)
        at = batch.ids_BL == model.config.image_token_id
        visual = out.pooler_output[batch.visual].to(embeddings.dtype)
        embeddings = embeddings.masked_scatter(at[..., None], visual)
        levels = [level[batch.visual] for level in out.deepstack_features]
        deepstack = {"visual_pos_masks": at, "deepstack_visual_embeds": levels}
    hidden = core.language_model(
        inputs_embeds=embeddings,
        position_ids=batch.position_3BL,
        attention_mask=batch.mask_B1LL,
        use_cache=False,
        **deepstack,
    ).last_hidden_state
    return model.lm_head(hidden[batch.target_BL != NOT_TRAINED]), label_loss
