"""The last norm by the kernel: of RMSNorms alone, the same numbers, each row for itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from epd.models.kernels import build
from epd.models.kernels.norm import fuse_norm

library = build.load()
pytestmark = pytest.mark.skipif(library is None, reason="no kernels on this machine")
HIDDEN = 200


class PlusOne(Qwen2RMSNorm):
    """As Gemma's: weights are distances from one."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) + super().forward(hidden_states) / self.weight


def decoder(norm: nn.Module) -> Any:
    made = nn.Module()
    made.norm = norm.bfloat16()
    return made


def random_norm(kind: Any) -> Any:
    norm = kind(HIDDEN, eps=1e-6)
    generator = torch.Generator().manual_seed(3)
    norm.weight.data = torch.rand(HIDDEN, generator=generator) + 0.5
    return norm


@torch.inference_mode()
def test_the_same_numbers_and_each_row_for_itself() -> None:
    assert library is not None
    model = decoder(random_norm(Qwen2RMSNorm))
    x = torch.randn(1, 40, HIDDEN, generator=torch.Generator().manual_seed(4)).bfloat16()
    wanted = model.norm(x)
    assert fuse_norm(model, library, 2) is not None
    found = model.norm(x)
    assert (found != wanted).float().mean() < 0.01
    assert torch.allclose(found.float(), wanted.float(), rtol=0.01)
    for row in (0, 17, 39):
        assert torch.equal(model.norm(x[:, row]), found[:, row])


@pytest.mark.parametrize("norm", [PlusOne, nn.LayerNorm])
def test_another_norm_stays(norm: Any) -> None:
    assert library is not None
    model = decoder(random_norm(norm))
    forward = model.norm.forward
    assert fuse_norm(model, library, 1) is None
    assert model.norm.forward == forward
