"""The jobs of one attempt, as messages. They agree in id, attempt, nonce and tokens."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from epd.jobs import DecodeJob, EncodeJob, PrefillJob, SampledToken, SamplingParams
from epd.rpc import jobs
from gateway.request import PlannedRequest
from protos.epd.v1 import decode_pb2, encode_pb2, prefill_pb2


@dataclass(frozen=True, slots=True)
class AttemptJobs:
    """Builds the first message of each call."""

    request: PlannedRequest
    number: int
    nonce: int
    fingerprint: str
    token_ids: tuple[int, ...]
    """Ids whose KV prefill makes: the prompt, then what earlier attempts generated."""
    choices: Sequence[int] = (0,)
    """Consecutive; they share prefill. More than one have generated nothing yet."""

    @classmethod
    def draw(
        cls,
        request: PlannedRequest,
        number: int,
        fingerprint: str,
        output: Sequence[SampledToken],
        choices: Sequence[int] = (0,),
    ) -> AttemptJobs:
        """With a fresh nonce: handles of an earlier attempt don't match."""
        assert len(choices) == 1 or not output
        ids = (*request.token_ids, *(token.id for token in output))
        return cls(request, number, secrets.randbits(64), fingerprint, ids, choices)

    @property
    def generated(self) -> int:
        return len(self.token_ids) - len(self.request.token_ids)

    @property
    def decode_follows(self) -> bool:
        return self.request.sampling.max_tokens - self.generated > 1

    def encode(self, index: int) -> encode_pb2.EncodeRequest:
        request = self.request
        job = EncodeJob(
            request.request_id,
            self.number,
            self.nonce,
            item=request.items[index],
            image=request.images[index],
            salt=request.salt,
        )
        return encode_pb2.EncodeRequest(job=jobs.encode_job_to_proto(job, self.fingerprint))

    def prefill(self) -> prefill_pb2.PrefillRequest:
        request = self.request
        job = PrefillJob(
            request.request_id,
            self.number,
            self.nonce,
            token_ids=self.token_ids,
            prompt_length=len(request.token_ids),
            items=request.items,
            sampling=self._sampling(self.choices[0]),
            decode_follows=self.decode_follows,
            salt=request.salt,
            choices=len(self.choices),
        )
        return prefill_pb2.PrefillRequest(job=jobs.prefill_job_to_proto(job, self.fingerprint))

    def decode(self, position_delta: int, choice: int = 0) -> decode_pb2.DecodeRequest:
        request = self.request
        job = DecodeJob(
            request.request_id,
            self.number,
            self.nonce,
            token_ids=self.token_ids,
            prompt_length=len(request.token_ids),
            items=request.items,
            sampling=self._sampling(choice),
            position_delta=position_delta,
            salt=request.salt,
            arrival_ms=request.arrival_ms,
        )
        return decode_pb2.DecodeRequest(job=jobs.decode_job_to_proto(job, self.fingerprint))

    def _sampling(self, choice: int) -> SamplingParams:
        sampling = self.request.sampling
        return sampling if sampling.choice == choice else replace(sampling, choice=choice)
