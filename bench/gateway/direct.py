"""The engine's own floor: its stages called as the gateway calls them, without a gateway."""

from __future__ import annotations

import secrets
import time
from typing import Any

import grpc.aio

from epd.config import RpcConfig
from epd.rpc.channels import dial
from protos.epd.v1 import (
    common_pb2,
    encode_pb2,
    encode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)

_TIMEOUT_S = 60.0


class Direct:
    """One client of the engine at `address`."""

    def __init__(self, address: str) -> None:
        self._channel = dial(address, RpcConfig())
        self._prefill: Any = prefill_pb2_grpc.PrefillStub(self._channel)
        self._encode: Any = encode_pb2_grpc.EncodeStub(self._channel)

    async def first_token(self, tokens: int, pictures: list[bytes]) -> float:
        """Seconds to the first token of a prompt of so many ids with these files."""
        begun = time.perf_counter()
        nonce = secrets.randbits(64)
        items = [common_pb2.ImageItem(index=n, digest=bytes(32)) for n in range(len(pictures))]
        job = prefill_pb2.PrefillJob(
            token_ids=range(400, 400 + tokens), prompt_length=tokens, items=items, nonce=nonce
        )
        call = self._prefill.Run(timeout=_TIMEOUT_S)
        await call.write(prefill_pb2.PrefillRequest(job=job))
        encoders: dict[int, Any] = {}
        async for event in call:
            kind = event.WhichOneof("kind")
            if kind == "admitted":
                for index in event.admitted.missing_items:
                    encoders[index] = await self._encoded(
                        items[index], pictures[index], call, nonce
                    )
            elif kind == "embedding_fetched":
                await encoders[event.embedding_fetched.index].done_writing()
            elif kind == "first_token":
                break
        took = time.perf_counter() - begun
        await call.done_writing()
        for ending in (call, *encoders.values()):
            assert await ending.code() is grpc.StatusCode.OK
        return took

    async def _encoded(
        self, item: common_pb2.ImageItem, picture: bytes, prefill: Any, nonce: int
    ) -> Any:
        """The encoder's call, of whose rows `prefill` has been told."""
        call = self._encode.Run(timeout=_TIMEOUT_S)
        job = encode_pb2.EncodeJob(item=item, image=picture, nonce=nonce)
        await call.write(encode_pb2.EncodeRequest(job=job))
        ready = (await call.read()).ready
        told = prefill_pb2.EmbeddingReady(index=ready.index, handle=ready.handle)
        await prefill.write(prefill_pb2.PrefillRequest(embedding_ready=told))
        return call

    async def close(self) -> None:
        await self._channel.close()
