"""Word of each layer that a forward has done: a long step that goes on is no stall."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def report_layers(model: nn.Module, done: Callable[[], None]) -> None:
    """Have `done` called, in the thread of the forward, after each layer of the model.

    Layers are what models keep in a `ModuleList`, so nothing is known by name. A forward
    that a CUDA graph replays has none.
    """
    layers = {
        layer for stack in model.modules() if isinstance(stack, nn.ModuleList) for layer in stack
    }
    for layer in layers:
        layer.register_forward_hook(lambda *_: done())
