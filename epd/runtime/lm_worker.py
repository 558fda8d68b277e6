"""What prefill's and decode's workers have in common: a language model and its KV cache."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Protocol

from epd.config import Config
from epd.kv.store import KvStore
from epd.models.lm import LanguageModel
from epd.models.warm_up import warm_up
from epd.runtime.group import Description, Load
from epd.runtime.kv import num_blocks
from epd.runtime.memory import OwnedMemory
from epd.runtime.steps import EngineThread, StepLoop
from epd.runtime.worker import StageWorker, TicketT


class _Scheduler(Protocol):
    """What is counted of either stage's."""

    @property
    def runnable(self) -> bool: ...
    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    def check_integrity(self) -> None: ...


class LmWorker(StageWorker[TicketT]):
    """Its forwards write to blocks of `kv`, which may be shared with another worker."""

    _scheduler: _Scheduler

    def __init__(
        self,
        config: Config,
        lm: LanguageModel,
        memory: OwnedMemory,
        kv: KvStore,
        max_context: int,
        thread: EngineThread | None,
    ) -> None:
        steps = StepLoop(self.stage, self._step, lambda: self._scheduler.runnable, thread)
        super().__init__(memory, steps)
        self._config = config
        self._lm = lm
        self.spec = lm.spec
        self._max_context = max_context
        self._layout = lm.kv_layout
        self._kv = kv
        self._num_blocks = num_blocks(config, self.stage)
        """That this stage may hold; of a shared pool a part."""
        lm.report_layers(self.steps.advance)

    @abstractmethod
    async def _step(self) -> bool:
        """One forward; false where there was nothing to run. See `StepLoop`."""

    def warm_up(self) -> None:
        """Before the first request: it should not pay for a cold start."""
        warm_up(self._lm, self._kv.pool)

    def describe(self) -> Description:
        return Description(
            epoch=self.memory.peer.epoch,
            fingerprint=self.spec.fingerprint,
            dtype=self._layout.dtype,
            numerics_id=self._lm.numerics_id,
            kv_layout=self._layout.name,
            kv_block_shape=self._layout.block_shape,
            kv_tokens=self._num_blocks * self._layout.block_tokens,
            max_context=self._max_context,
        )

    def load(self) -> Load:
        free = self._kv.blocks.free_count * self._layout.block_tokens
        return Load(self._scheduler.running, self._scheduler.waiting, free)

    def state(self) -> Mapping[str, object]:
        return {
            **self._common_state(),
            "waiting": self._scheduler.waiting,
            "running": self._scheduler.running,
            **self._kv.state(),
            "weights_bytes": self._lm.weights_bytes,
        }

    @property
    def _idle(self) -> bool:
        """Whether no block may be held: no request, no reader that was lost."""
        return not (self._tickets or self.memory.leases.quarantined_bytes)

    def check_integrity(self) -> None:
        """Assert the bookkeeping; call it when idle or after a test."""
        self._scheduler.check_integrity()
        self._kv.check_integrity()
        if self._idle:
            assert self._kv.blocks.used == 0, "a block leaked"
