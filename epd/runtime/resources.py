"""What the stages of one process share: each thing made once, when it is first asked for.

encode   -> memory, engine thread
prefill  -> memory, engine thread, language model, KV store
decode   -> memory, engine thread, language model, KV store
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from epd.config import Config
from epd.errors import invalid
from epd.jobs import Stage
from epd.models.spec import read_spec
from epd.runtime.core_turns import CoreTurns
from epd.runtime.memory import OwnedMemory
from epd.runtime.steps import EngineThread

if TYPE_CHECKING:
    from epd.kv.store import KvStore
    from epd.models.lm import LanguageModel


class Resources:
    """Of a process that hosts `stages`."""

    def __init__(self, config: Config, stages: Sequence[Stage]) -> None:
        self.config = config
        self.stages = tuple(stages)
        name, file = "+".join(self.stages), config.worker.turns_file
        self.thread = EngineThread(name, CoreTurns(file, name) if file else None)

    @cached_property
    def memory(self) -> OwnedMemory:
        """One transfer engine, one epoch. Raises EpdError: the engine can't start."""
        model = self.config.model
        return OwnedMemory(self.config, read_spec(model.path, model.dtype).fingerprint)

    @cached_property
    def lm(self) -> LanguageModel:
        """One copy of the weights. Raises EpdError: the checkpoint can't be served, or the
        stages want different weights."""
        from epd.models.lm import LanguageModel

        model = self.config.model
        users = [stage for stage in self.stages if stage is not Stage.ENCODE]
        quantize = {model.quantize_in(stage) for stage in users}
        if len(quantize) > 1:
            raise invalid(
                f"{model.quantize} gives prefill and decode different weights, and in "
                f"{'+'.join(self.stages)} they share them: choose int8, or two processes",
                "model.quantize",
            )
        return LanguageModel.load(
            model.path,
            dtype=model.dtype,
            device=model.device,
            exact=model.exact,
            threads=model.threads,
            block_tokens=self.config.kv.block_tokens,
            kernels=model.kernels,
            quantize=quantize.pop(),
        )

    @cached_property
    def kv(self) -> KvStore:
        """One pool, one allocator, one prefix cache for prefill and decode."""
        from epd.runtime.kv import make_store

        users = [stage for stage in self.stages if stage is not Stage.ENCODE]
        return make_store(self.config, users, self.lm, self.memory)
