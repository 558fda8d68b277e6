"""What handing over a prompt's KV cache costs, beside computing it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from epd.bench.stage.case import Case
from epd.bench.stage.compute import chunk
from epd.bench.stage.transfer import NBYTES, Pull, pulling
from epd.kv.pool import KvPool
from epd.models.lm import LanguageModel
from epd.transfer.checksum import checksum_at

PROMPT_TOKENS = 1000
STEP_TOKENS = 512


@contextmanager
def handoff_cases(lm: LanguageModel) -> Iterator[list[Case]]:
    """Prefill of a prompt; sealing its blocks (the owner's sums); reading and verifying
    them. In service the last two overlap the next chunk: their sum is the most that the
    hand-off can add."""
    layout = lm.kv_layout
    blocks = layout.blocks_for(PROMPT_TOKENS)
    nbytes = blocks * layout.block_bytes
    assert nbytes <= NBYTES, "the prompt's KV is larger than the peer's memory"
    pool = KvPool(layout, blocks)
    with pulling() as pull:
        prefill = Case(f"prefill of {PROMPT_TOKENS} tokens", partial(_prefill, lm, pool))
        size = f"{nbytes / 2**20:.1f} MiB"
        seal = partial(_seal, pool)
        read = _reader(pull, blocks, layout.block_bytes)
        yield [
            prefill,
            Case(f"seal its {blocks} blocks ({size})", seal, base=prefill),
            Case("read and verify them", read, base=prefill),
        ]


def _prefill(lm: LanguageModel, pool: KvPool) -> None:
    for start in range(0, PROMPT_TOKENS, STEP_TOKENS):
        end = min(start + STEP_TOKENS, PROMPT_TOKENS)
        lm.forward(chunk(lm, end - start, end), pool)


def _seal(pool: KvPool) -> None:
    for block in range(pool.num_blocks):
        checksum_at(pool.address(block), pool.layout.block_bytes)


def _reader(pull: Pull, blocks: int, block_bytes: int) -> partial[None]:
    spans = [(block * block_bytes, block_bytes) for block in range(blocks)]
    handle = pull.announce(spans)
    return partial(pull.run, handle, [at for at, _ in spans], verify=True)
