"""What a layer is made of, as kernels ask before they take it over."""

from __future__ import annotations

from typing import Any

from torch import nn


def has_parameters(module: nn.Module) -> bool:
    """Of its own, not of its children."""
    return next(module.parameters(recurse=False), None) is not None


def epsilon_of(norm: Any) -> float | None:
    """Of a norm of any family; None: it has none that is known."""
    found = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return found if isinstance(found, float) else None
