"""From a job to a ticket: checks, position rows, placeholders. Nothing is held yet."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from epd.config import Config
from epd.errors import EpdError, ErrorKind, invalid
from epd.jobs import PrefillJob
from epd.kv.prefix import BlockChain
from epd.kv.store import KvStore
from epd.models.lm import LanguageModel
from epd.runtime.streams import Stopwatch
from epd.sampling.grammar import Grammars, Matcher
from epd.sampling.params import validate
from epd.sampling.state import SamplerState
from prefill.embeddings import Landing
from prefill.ticket import Ticket, item_spans


class Planner:
    """Position rows and hashes are computed in a thread of their own: for a long prompt
    they take a while, and the engine thread has better things to do."""

    def __init__(
        self, config: Config, lm: LanguageModel, kv: KvStore, num_blocks: int, landing: Landing
    ) -> None:
        self._lm = lm
        self._kv = kv
        self._num_blocks = num_blocks
        self._landing = landing
        self._limits = config.limits
        self._keys = itertools.count()
        spec = lm.spec
        self._grammars = Grammars(spec.path, spec.vocab_size, spec.eos_token_ids)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefill-positions")

    async def plan(self, job: PrefillJob) -> Ticket:
        """Tickets come back in the order of the calls.

        Raises:
            EpdError: a parameter is wrong, or the request can't fit an idle worker.
        """
        since = Stopwatch()
        self._check(job)
        positions, delta, chain = await asyncio.get_running_loop().run_in_executor(
            self._thread, self._placed, job
        )
        matcher = await self._grammars.compile(
            job.sampling.grammar, job.token_ids[job.prompt_length :]
        )
        return Ticket(
            key=next(self._keys),
            job=job,
            positions=positions,
            delta=delta,
            spans=item_spans(job, self._lm.spec.image_token_id),
            samplers=tuple(_samplers(job, matcher)),
            chain=chain,
            since=since,
        )

    def _placed(self, job: PrefillJob) -> tuple[torch.Tensor, int, BlockChain]:
        positions, delta = self._lm.positions(
            torch.tensor(job.token_ids), job.items, job.prompt_length
        )
        chain = self._kv.chain(
            job.token_ids,
            job.items,
            image_token_id=self._lm.spec.image_token_id,
            prompt_length=job.prompt_length,
            salt=job.salt,
        )
        return positions, delta, chain

    def _check(self, job: PrefillJob) -> None:
        spec, layout = self._lm.spec, self._lm.kv_layout
        validate(job.sampling, spec.vocab_size, self._limits)
        if len(job.token_ids) - job.prompt_length >= job.sampling.max_tokens:
            raise invalid("everything is generated already", "job.sampling.max_tokens")
        if layout.blocks_for(len(job.token_ids)) > self._num_blocks:
            raise EpdError(
                ErrorKind.CONTEXT_LENGTH_EXCEEDED,
                f"the prompt has {len(job.token_ids)} tokens, prefill's pool "
                f"(kv.prefill_tokens) holds {self._num_blocks * layout.block_tokens}",
                param="job.token_ids",
            )
        self._landing.check_fits(job.items)

    def close(self) -> None:
        self._grammars.close()
        self._thread.shutdown(wait=False, cancel_futures=True)


def _samplers(job: PrefillJob, matcher: Matcher | None) -> Iterator[SamplerState]:
    """One for each choice; they share nothing that changes."""
    prompt, output = job.token_ids[: job.prompt_length], job.token_ids[job.prompt_length :]
    for number in range(job.choices):
        params = replace(job.sampling, choice=job.sampling.choice + number)
        yield SamplerState(params, prompt, output, matcher.copy() if matcher else None)
