"""A worker's KV cache, from configuration, model and registered memory."""

from __future__ import annotations

from functools import partial

from epd.config import Config
from epd.jobs import Stage
from epd.kv.store import KvStore
from epd.models.lm import LanguageModel
from epd.obs import metrics
from epd.runtime.memory import OwnedMemory


def make_store(config: Config, stage: Stage, lm: LanguageModel, memory: OwnedMemory) -> KvStore:
    """The store of a prefill or decode worker; its pool is registered for peers to read."""
    cached = {
        Stage.PREFILL: config.prefill.prefix_cache,
        Stage.DECODE: config.decode.prefix_cache,
    }[stage]
    store = KvStore(
        lm.kv_layout,
        num_blocks(config, stage),
        lm.device,
        fingerprint=lm.spec.fingerprint,
        numerics_id=lm.numerics_id,
        cached=cached,
        mirrored=True if config.transfer.staging == "always" else None,
        count=partial(metrics.count_cache, f"{stage}_prefix"),
    )
    memory.register(store.pool.address(0), store.pool.nbytes, store.pool)
    return store


def num_blocks(config: Config, stage: Stage) -> int:
    """Blocks of the stage's pool."""
    tokens = {Stage.PREFILL: config.kv.prefill_tokens, Stage.DECODE: config.kv.decode_tokens}
    return max(1, tokens[stage] // config.kv.block_tokens)
