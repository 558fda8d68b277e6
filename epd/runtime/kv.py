"""A worker's KV cache, from configuration, model and registered memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from epd.config import Config
from epd.jobs import Stage
from epd.kv.store import KvStore
from epd.models.lm import LanguageModel
from epd.obs import metrics
from epd.pages import asked_for_by
from epd.runtime.memory import OwnedMemory


def make_store(
    config: Config, stages: Sequence[Stage], lm: LanguageModel, memory: OwnedMemory
) -> KvStore:
    """The store of a prefill or decode worker, or of both together; its pool is registered
    for peers to read. One that is shared has both stages' blocks, and each stage may rely
    on its own number of them.

    Raises:
        EpdError: there is no memory for it.
    """
    cached = {
        Stage.PREFILL: config.prefill.prefix_cache,
        Stage.DECODE: config.decode.prefix_cache,
    }
    with asked_for_by(*(f"kv.{stage}_tokens" for stage in stages)):
        store = KvStore(
            lm.kv_layout,
            sum(num_blocks(config, stage) for stage in stages),
            lm.device,
            fingerprint=lm.spec.fingerprint,
            numerics_id=lm.numerics_id,
            cached=all(cached[stage] for stage in stages),
            mirrored=True if config.transfer.staging == "always" else None,
            count=partial(metrics.count_cache, f"{'_'.join(stages)}_prefix"),
        )
    memory.register(store.pool.address(0), store.pool.nbytes, store.pool)
    return store


def num_blocks(config: Config, stage: Stage) -> int:
    """Blocks of the stage's pool."""
    tokens = {Stage.PREFILL: config.kv.prefill_tokens, Stage.DECODE: config.kv.decode_tokens}
    return max(1, tokens[stage] // config.kv.block_tokens)
