"""Decode as a part of a process: model and memory put together."""

from __future__ import annotations

from decode.service import DecodeService
from decode.worker import DecodeWorker
from epd.jobs import Stage
from epd.rpc.jobs import ModelFacts
from epd.rpc.server import Server
from epd.runtime.context import max_context
from epd.runtime.kv import num_blocks
from epd.runtime.resources import Resources
from epd.runtime.stage import Part
from protos.epd.v1 import decode_pb2_grpc


async def build(shared: Resources) -> Part:
    """Put the worker together; loads the language model if nobody did.

    Raises:
        EpdError: the checkpoint can't be served, or the transfer engine can't start;
            the message says why.
    """
    config, lm, memory = shared.config, shared.lm, shared.memory
    pool_tokens = num_blocks(config, Stage.DECODE) * config.kv.block_tokens
    context = max_context(config, lm.spec, pool_tokens)
    worker = DecodeWorker(config, lm, memory, shared.kv, context, shared.thread)
    worker.warm_up()
    facts = ModelFacts.of(lm.spec, context, config.limits)

    def add_service(server: Server) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(
            DecodeService(worker, facts, config.limits.request_deadline_s), server.grpc
        )

    return Part(worker, "epd.v1.Decode", add_service, config.rpc.control_bytes)
