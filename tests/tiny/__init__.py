"""Tiny random checkpoints of every served family, and what transformers answers on them.

Real architectures, processors, tokenizers and chat templates with few and small
layers: everything that can go wrong between the stages goes wrong here too.
"""

from __future__ import annotations

from tests.tiny.build import FAMILIES, build
from tests.tiny.reference import Reference, reference_forced, reference_generate

__all__ = ["FAMILIES", "Reference", "build", "reference_forced", "reference_generate"]
